# SPDX-License-Identifier: Apache-2.0
"""``vllm-domino train``: answers, and a draft that learns from them."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_domino.cli.common import refusals

app = typer.Typer(help="Train a draft.", no_args_is_help=True)


@app.command(
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
    with refusals(console):
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


@app.command(
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
    with refusals(console):
        draft = train(Recipe.read(recipe), console, resume)
        console.print(f"draft saved in {draft}")
