# SPDX-License-Identifier: Apache-2.0
"""``vllm-domino bench``: measurements, as tables, JSON and plots."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from vllm_domino.cli import compare
from vllm_domino.cli.common import refusals, require_folders

app = typer.Typer(help="Measure.", no_args_is_help=True)
app.registered_commands += compare.app.registered_commands


@app.command(
    epilog="Example: vllm-domino bench head --shape qwen3-8b --batch 1 --batch 8 "
    "--like pairs/bytes4/domino-shift --sglang wheels/"
)
def head(
    like: Annotated[
        Path,
        typer.Option(
            exists=True,
            file_okay=False,
            help="A trained draft; the measured W2 has its spectrum and row norms.",
        ),
    ],
    shape: Annotated[str, typer.Option(help="qwen3-4b, qwen3-8b, ...")] = "qwen3-8b",
    batch: Annotated[
        list[int] | None, typer.Option(help="Requests; may be given several times.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed rounds.", min=1)] = 15,
    blocks: Annotated[
        int, typer.Option(help="Blocks whose tokens are compared.", min=0)
    ] = 0,
    changed: Annotated[
        float, typer.Option(help="Part of positions whose winner is corrected.")
    ] = 0.4,
    pool_size: Annotated[int, typer.Option(help="Of the pools.", min=1)] = 2048,
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option(help="Of weights and logits.")
    ] = "bfloat16",
    sglang: Annotated[
        Path | None, typer.Option(help="Where SGLang's wheel is unpacked.")
    ] = None,
    seed: Annotated[int, typer.Option()] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="To write.")] = None,
    png: Annotated[Path | None, typer.Option(help="To plot into.")] = None,
) -> None:
    """Time the head's modes beside the lm_head, in turns."""
    import torch

    from vllm_domino.bench import head as bench
    from vllm_domino.bench.head_case import SIZES, make_case
    from vllm_domino.errors import DraftConfigError

    console = Console()
    with refusals(console):
        require_folders(json_file, png)
        if shape not in SIZES:
            raise DraftConfigError(
                f"--shape is {shape!r}; known are: {', '.join(SIZES)}."
            )
        with console.status("making weights"):
            precision = getattr(torch, dtype)
            case = make_case(SIZES[shape], like, changed, precision, seed)
        results = [
            bench.measure(
                shape, case, size, repeats, blocks, sglang, pool_size, console
            )
            for size in batch or [1]
        ]
    console.print(bench.table(results))
    first = results[0]
    console.print(
        f"{first.machine}; the correction changes the winner at {first.changed:.0%} of "
        f"the positions; reads {first.ceiling_bytes_per_s / 1e9:.1f} GB/s at best, at "
        f"which each weight's one reading, {first.floor_bytes / 1e9:.2f} GB, takes "
        f"{first.floor * 1e3:.1f} ms. GB/s: of what a mode reads of the weights, cache "
        "or memory",
        soft_wrap=True,
    )
    if json_file is not None:
        json_file.write_text(bench.as_json(results) + "\n")
    if png is not None:
        bench.plot(results, png)
