# SPDX-License-Identifier: Apache-2.0
"""``inspect`` and ``convert``: drafts on disk."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from vllm_domino.cli.common import refusals

app = typer.Typer()

Source = Annotated[str, typer.Argument(help="A draft's folder or hub id.")]
Revision = Annotated[str | None, typer.Option(help="The draft's, on its hub.")]
AllowPickle = Annotated[
    bool, typer.Option(help="Read pickled weights too, as plain tensors.")
]


@app.command(
    epilog="Example: vllm-domino inspect Huang2020/Qwen3-8B-Domino-b16 --target "
    "Qwen/Qwen3-8B"
)
def inspect(
    draft: Source,
    target: Annotated[
        str | None, typer.Option(help="Folder or hub id to compare with.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    revision: Revision = None,
    allow_pickle: AllowPickle = False,
) -> None:
    """Say whose a draft is, what it holds, whether it fits, and how to serve it.

    The exit status is 1 if its weights are not whole or it does not fit the target.
    """
    from vllm_domino import inspection
    from vllm_domino.draft import Draft

    console = Console()
    with refusals(console):
        found = inspection.inspect(Draft.open(draft, revision, allow_pickle), target)
    if as_json:
        typer.echo(found.as_json())
    else:
        console.print(inspection.as_tables(found))
        console.print(Text(found.serve), soft_wrap=True)
    raise typer.Exit(0 if found.is_sound else 1)


@app.command(
    epilog="Example: vllm-domino convert my-draft my-draft-speculators --to "
    "speculators --target Qwen/Qwen3-8B"
)
def convert(
    source: Source,
    destination: Annotated[Path, typer.Argument(help="Folder to make.")],
    to: Annotated[str, typer.Option(help="released, specforge or speculators.")],
    target: Annotated[
        str, typer.Option(help="The target's name, for speculators' layout.")
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Replace what is there.")
    ] = False,
    revision: Revision = None,
    allow_pickle: AllowPickle = False,
) -> None:
    """Write a draft in another maker's layout, its values untouched."""
    from vllm_domino.convert import convert as convert_draft
    from vllm_domino.draft import Draft

    console = Console()
    with refusals(console), console.status("converting"):
        draft = Draft.open(source, revision, allow_pickle)
        convert_draft(draft, destination, to, target, force)
    console.print(f"{draft.maker.title} -> {to}: {destination}", soft_wrap=True)
