# SPDX-License-Identifier: Apache-2.0
"""``doctor`` and ``mend``: the machine, its installation."""

import typer
from rich.console import Console
from rich.text import Text

app = typer.Typer()

_MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "bad": ("bad", "bold red")}


@app.command(epilog="Example: vllm-domino doctor && vllm serve ...")
def doctor() -> None:
    """Say whether this machine can draft with Domino, and what to do if not.

    The exit status is 1 if something is bad, 0 otherwise.
    """
    from vllm_domino.doctor import examine

    console = Console()
    bad = 0
    with console.status("looking"):
        for finding in examine():
            mark, style = _MARKS[finding.verdict]
            line = Text.assemble(
                (f"{mark:<5}", style), (f"{finding.subject}: ", "bold"), finding.found
            )
            console.print(line, soft_wrap=True)
            if finding.remedy:
                console.print(Text(f"      -> {finding.remedy}"), soft_wrap=True)
            bad += finding.verdict == "bad"
    raise typer.Exit(1 if bad else 0)


@app.command(epilog='Example: pip install "vllm-domino[cpu]" && vllm-domino mend')
def mend() -> None:
    """Mend what a fresh CPU install of vLLM gets wrong; run it once."""
    from vllm_domino.mend import mend as mend_environment

    done = list(mend_environment())
    for line in done:
        typer.echo(line)
    if not done:
        typer.echo("nothing to mend")
