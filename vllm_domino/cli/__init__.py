# SPDX-License-Identifier: Apache-2.0
"""The ``vllm-domino`` command. One file a group of commands; what they do lies
elsewhere and is imported when a command runs, so that ``mend`` works where nothing
imports."""

import typer

from vllm_domino.cli import bench, drafts, machine, serving, train

app = typer.Typer(
    help="Domino speculative decoding for unmodified vLLM.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
for _group in (serving.app, drafts.app, machine.app):
    app.registered_commands += _group.registered_commands
app.add_typer(train.app, name="train")
app.add_typer(bench.app, name="bench")


def main() -> None:
    app()
