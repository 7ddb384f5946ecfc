# SPDX-License-Identifier: Apache-2.0
"""What the commands share."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from vllm_domino.errors import DominoError

# For commands that hand on to vLLM what they do not know.
PASSES_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def require_folders(*files: Path | None) -> None:
    """Before long work: the files that it will write have a folder to lie in.

    Raises:
        DominoError: One has none.
    """
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise DominoError(
                f"{file}: there is no folder {file.parent}. Make it first."
            )


@contextmanager
def refusals(console: Console) -> Iterator[None]:
    """Prints a refusal of ours as its one sentence, not as a traceback; one of the
    system's (a full disk, a folder that may not be written) too."""
    try:
        yield
    except (DominoError, OSError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None
