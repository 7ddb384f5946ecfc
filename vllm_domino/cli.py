# SPDX-License-Identifier: Apache-2.0
"""The ``vllm-domino`` command."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from vllm_domino.errors import DominoError

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
            help="JSON list of prompts: texts, token ids, or chat messages.",
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


train_app = typer.Typer(help="Train a draft.", no_args_is_help=True)
app.add_typer(train_app, name="train")


@train_app.command(
    "data",
    epilog="Example: vllm-domino train data Qwen/Qwen3-8B prompts.jsonl answers.jsonl",
)
def train_data(
    target: Annotated[str, typer.Argument(help="Folder or hub id of the target.")],
    prompts: Annotated[
        str,
        typer.Argument(
            help="JSONL with `messages`, `prompt` or `text`, or a Hugging Face dataset."
        ),
    ],
    output: Annotated[Path, typer.Argument(help="JSONL of answers; resumed if there.")],
    split: Annotated[str, typer.Option(help="Split of a dataset.")] = "train",
    field: Annotated[
        str | None, typer.Option(help="Where a row has its prompt.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens an answer, at most.")] = 2048,
    temperature: Annotated[float, typer.Option(help="0 for greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampled answers.")] = 0,
    engine: Annotated[
        str, typer.Option(help="JSON of more arguments for vLLM's LLM.")
    ] = "{}",
) -> None:
    """Let the target answer prompts, through vLLM: what a draft trains on."""
    from vllm_domino.training.generate import answer_prompts, read_prompts

    console = Console()
    with _refusals(console):
        answer_prompts(
            target,
            read_prompts(prompts, split, field),
            output,
            console,
            max_tokens,
            temperature,
            seed,
            json.loads(engine),
        )


@train_app.command(
    "run",
    epilog="Example: vllm-domino train run configs/train/qwen3-8b.yaml. On several "
    "devices: accelerate launch -m vllm_domino train run RECIPE",
)
def train_run(
    recipe: Annotated[Path, typer.Argument(help="YAML; see configs/train/.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in its output folder.")
    ] = False,
) -> None:
    """Train a draft as a recipe says."""
    from vllm_domino.training.recipe import Recipe
    from vllm_domino.training.trainer import train

    console = Console()
    with _refusals(console):
        draft = train(Recipe.read(recipe), console, resume)
        console.print(f"draft saved in {draft}")


@contextmanager
def _refusals(console: Console) -> Iterator[None]:
    """Prints a refusal of ours as its one sentence, not as a traceback."""
    try:
        yield
    except DominoError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None


def main() -> None:
    app()
