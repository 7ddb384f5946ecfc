# SPDX-License-Identifier: Apache-2.0
"""``serve``, ``generate`` and ``demo``: a target with its draft, through vLLM."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from vllm_domino.cli.common import PASSES_ON, refusals

app = typer.Typer()

Target = Annotated[
    str | None,
    typer.Argument(help="Folder or hub id; left out, the one that the draft names."),
]
DraftOption = Annotated[str, typer.Option("--draft", help="Folder or hub id.")]
Drafts = Annotated[
    int | None,
    typer.Option(
        "--num-drafts", "-k", help="Tokens a block; as many as trained if left out."
    ),
]
SampleMethod = Annotated[
    str | None,
    typer.Option(help="How sampled requests are drafted: greedy or probabilistic."),
]
DraftBlock = Annotated[
    str | None,
    typer.Option(help="Rows of a block with fewer drafts: short or trained."),
]
Revision = Annotated[str | None, typer.Option(help="The draft's, on its hub.")]


@app.command(
    context_settings=PASSES_ON,
    epilog="Example: vllm-domino serve Qwen/Qwen3-8B --draft "
    "Huang2020/Qwen3-8B-Domino-b16 --max-model-len 8192",
)
def serve(
    context: typer.Context,
    draft: DraftOption,
    target: Target = None,
    num_drafts: Drafts = None,
    draft_sample_method: SampleMethod = None,
    draft_block: DraftBlock = None,
    draft_revision: Revision = None,
) -> None:
    """Serve a target with its draft: `vllm serve`, the speculative config filled in.

    Arguments that are not listed here go to `vllm serve` as they are.
    """
    from vllm_domino import launch

    console = Console(stderr=True)
    with refusals(console):
        choice = launch.Choice(
            draft, num_drafts, draft_sample_method, draft_block, draft_revision
        )
        target, arguments = _split(target, context.args)
        command = launch.serve_command(
            launch.target_of(target, choice), choice, arguments
        )
        console.print(Text(launch.shown(command)), style="dim", soft_wrap=True)
        launch.serve(command)


@app.command(
    context_settings=PASSES_ON,
    epilog="Example: vllm-domino generate Qwen/Qwen3-8B --draft "
    'Huang2020/Qwen3-8B-Domino-b16 --prompt "Why is the sky blue?"',
)
def generate(
    context: typer.Context,
    draft: DraftOption,
    target: Target = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; may be given several times.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="JSON list of prompts."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="An answer, at most.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 for greedy.", min=0)] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    num_drafts: Drafts = None,
    draft_sample_method: SampleMethod = None,
    draft_block: DraftBlock = None,
    draft_revision: Revision = None,
) -> None:
    """Answer prompts with a target and its draft, through vLLM's `LLM`.

    Arguments that are not listed here are engine flags, as `vllm serve` has them.
    """
    from vllm_domino import launch

    console = Console()
    with refusals(console):
        asked = launch.read_prompts(prompt or [], prompts)
        choice = launch.Choice(
            draft, num_drafts, draft_sample_method, draft_block, draft_revision
        )
        target, arguments = _split(target, context.args)
        found = launch.generate(
            launch.target_of(target, choice),
            choice,
            asked,
            {"max_tokens": max_tokens, "temperature": temperature},
            arguments,
        )
    if as_json:
        typer.echo(found.as_json())
        return
    for answer in found.answers:
        console.print(Text(answer.prompt, style="bold"), soft_wrap=True)
        console.print(Text(answer.text), soft_wrap=True)
        console.print()
    if found.acceptance_length is not None:
        console.print(f"acceptance length: {found.acceptance_length:.2f} tokens a step")


def _split(target: str | None, rest: list[str]) -> tuple[str | None, list[str]]:
    """An unknown flag right after the command is no target."""
    if target is not None and target.startswith("-"):
        return None, [target, *rest]
    return target, rest


@app.command(
    context_settings=PASSES_ON,
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
