# SPDX-License-Identifier: Apache-2.0
"""``bench offline`` and ``bench serve``: methods side by side on the same prompts."""

import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vllm_domino.cli.common import PASSES_ON, refusals, require_folders

if TYPE_CHECKING:
    from vllm_domino.bench.result import Report

app = typer.Typer()

Target = Annotated[str, typer.Argument(help="Folder or hub id of the target.")]
MethodOption = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        help="none, ngram, suffix, dflash, domino, or LABEL={...} with a speculative "
        "config; may be given several times. None, ngram and domino if left out.",
    ),
]
DraftOption = Annotated[
    str | None, typer.Option("--draft", help="The Domino draft: folder or hub id.")
]
DflashOption = Annotated[
    str | None, typer.Option("--dflash", help="The DFlash draft: folder or hub id.")
]
Drafts = Annotated[
    list[int] | None,
    typer.Option(
        "--num-drafts",
        "-k",
        min=1,
        help="Tokens a block; may be given several times. As many as the Domino draft "
        "was trained for if left out.",
    ),
]
Prompts = Annotated[
    str,
    typer.Option(
        help="gsm8k, math500, aime24, aime25, humaneval, mbpp, livecodebench, "
        "swe-bench, mt-bench, alpaca, or a JSON or JSONL file."
    ),
]
NumPrompts = Annotated[int | None, typer.Option(min=1, help="All if left out.")]
AtOnce = Annotated[
    list[int] | None,
    typer.Option(min=1, help="Requests at once; may be given several times. 1 and 8."),
]
MaxTokens = Annotated[int, typer.Option(min=2, help="Of an answer.")]
Temperature = Annotated[float, typer.Option(min=0.0)]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Answers of full length.")
]
Repeats = Annotated[int, typer.Option(min=1, help="Timed rounds.")]
Seed = Annotated[int, typer.Option(help="Of the draw of prompts.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="To write.")]
MarkdownFile = Annotated[
    Path | None, typer.Option("--markdown", help="To write, with plots beside it.")
]


def _tell(
    console: Console,
    report: "Report",
    json_file: Path | None,
    markdown_file: Path | None,
) -> None:
    from vllm_domino.bench import report as form

    console.print(form.table(report))
    for sentence in form.outputs(report):
        console.print(sentence)
    if json_file is not None:
        json_file.write_text(form.as_json(report))
    if markdown_file is not None:
        plots = form.plot(report, markdown_file.parent, markdown_file.stem)
        markdown_file.write_text(form.markdown(report, plots))


@app.command(
    "offline",
    context_settings=PASSES_ON,
    help="Compare methods through vLLM's `LLM`: speed, latency, acceptance, time split."
    "\n\nArguments that are not listed here are the engine's, as for `vllm serve`.",
    epilog="Example: vllm-domino bench offline Qwen/Qwen3-8B --draft "
    "Huang2020/Qwen3-8B-Domino-b16 --prompts gsm8k --num-prompts 64",
)
@app.command(
    "serve",
    context_settings=PASSES_ON,
    help="Compare methods through `vllm serve` and `vllm bench serve`."
    "\n\nArguments that are not listed here go to `vllm serve` as they are.",
    epilog="Example: vllm-domino bench serve Qwen/Qwen3-8B --draft "
    "Huang2020/Qwen3-8B-Domino-b16 --prompts mt-bench",
)
def compare(
    context: typer.Context,
    target: Target,
    method: MethodOption = None,
    draft: DraftOption = None,
    dflash: DflashOption = None,
    num_drafts: Drafts = None,
    prompts: Prompts = "humaneval",
    num_prompts: NumPrompts = None,
    at_once: AtOnce = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    ignore_eos: IgnoreEos = False,
    repeats: Repeats = 3,
    seed: Seed = 0,
    json_file: JsonFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    from vllm_domino.bench.methods import Choice
    from vllm_domino.bench.prompts import load_prompts
    from vllm_domino.bench.work import Work
    from vllm_domino.config_file import require_model

    console = Console()
    with refusals(console):
        require_folders(json_file, markdown_file)
        require_model(target)
        usual = ["none", "ngram", *(["dflash"] if dflash else []), "domino"]
        choice = Choice(method or usual, draft, dflash, tuple(num_drafts or ()))
        asked = load_prompts(prompts, num_prompts, seed)
        methods = choice.methods()
        work = Work(
            target,
            asked,
            at_once or [1, 8],
            max_tokens,
            temperature,
            ignore_eos,
            repeats,
            context.args,
        )
        drawn = f" drawn with seed {seed}" if num_prompts else ""
        named = f"{prompts}, {len(asked)} prompts{drawn}"
        typed = shlex.join(["vllm-domino", *sys.argv[1:]])
        bench = import_module(f"vllm_domino.bench.{context.command.name}")
        report = bench.run(console, work, methods, named, typed)
        _tell(console, report, json_file, markdown_file)
