# SPDX-License-Identifier: Apache-2.0
"""The ``vllm-domino`` command."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    help="Domino speculative decoding for unmodified vLLM.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Example: vllm-domino demo pairs/bytes4/target --speculative-config "
    "configs/demo.json --prompts pairs/bytes4/prompts.json --enforce-eager",
)
def demo(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="Folder or hub id of the target.")],
    speculative_config: Annotated[
        Path,
        typer.Option(exists=True, dir_okay=False, help="JSON file, as vLLM takes it."),
    ],
    prompts: Annotated[
        Path,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="JSON list of prompts: texts, or lists of token ids.",
        ),
    ],
) -> None:
    """Serve a target with and without Domino, ask both the same, compare.

    Arguments that are not listed here go to both `vllm serve` processes.
    """
    from vllm_domino.demo import run

    console = Console()
    equal = run(
        console,
        target,
        json.loads(speculative_config.read_text()),
        json.loads(prompts.read_text()),
        context.args,
    )
    raise typer.Exit(0 if equal else 1)


@app.command()
def mend() -> None:
    """Mend what a fresh CPU install of vLLM gets wrong; run it once."""
    from vllm_domino.mend import mend as mend_environment

    done = list(mend_environment())
    for line in done:
        typer.echo(line)
    if not done:
        typer.echo("nothing to mend")


def main() -> None:
    app()
