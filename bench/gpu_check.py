# SPDX-License-Identifier: Apache-2.0
"""Checks the head's Triton kernels on a GPU, and times them there.

    python bench/gpu_check.py [--json FILE] [--no-timing]

Needs torch and triton only. Runs what tests/test_kernels.py runs in Triton's
interpreter (``--interpret``, no timing), then captures whole rollouts in CUDA graphs,
compares their tokens, and times them at Qwen3-8B's sizes beside the lm_head.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F

from vllm_domino.bench import kernel_checks
from vllm_domino.fused import FusedDense, FusedExact, FusedSteps
from vllm_domino.head import DominoHead, HeadShape, rollout
from vllm_domino.rollouts import Rollout, StepByStep
from vllm_domino.scoring import GUESSES
from vllm_domino.steps import Steps

QWEN3_8B = HeadShape(4096, 1024, 256, 151936)
SMALL = HeadShape(50, 21, 13, 301)
NUM_DRAFTS, FEW_DRAFTS = 15, 5
BLOCK_BATCHES = (1, 17)
# Guesses that are often wrong, and hardly ever.
POOLS = (3, 150)
REPEATS = 30
TIMED_BATCHES = (1, 8, 64)


class Case:
    """A head and blocks whose winners the correction often moves."""

    def __init__(
        self,
        shape: HeadShape,
        num_reqs: int,
        num_drafts: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        numbers = kernel_checks.Numbers(device, dtype, seed=num_reqs)
        self.head = DominoHead(shape, 1).requires_grad_(False).to(device, dtype)
        for weight in self.head.parameters():
            weight.copy_(numbers.normal(*weight.shape, scale=weight.shape[-1] ** -0.5))
        self.head.embed_proj[2].weight.mul_(6)
        self.table = numbers.normal(shape.vocab_size, shape.hidden_size)
        self.hidden = numbers.normal(num_reqs, num_drafts, shape.hidden_size)
        self.base = numbers.normal(num_reqs, num_drafts, shape.vocab_size, scale=3)
        self.bonus = numbers.ids(num_reqs, shape.vocab_size)
        self.steps = FusedSteps(Steps(self.head, self.embed), self.table)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.table)

    def by_torch(self) -> torch.Tensor:
        return rollout(self.head, self.hidden, self.base, self.bonus, self.embed)

    def by(self, rollout: Rollout) -> Callable[[], torch.Tensor]:
        return lambda: rollout.draft(
            self.hidden, self.base, self.bonus, lambda values, ids: ids
        )

    def fused(self) -> Callable[[], torch.Tensor]:
        return self.by(StepByStep(self.steps, FusedDense(self.steps.vocab)))

    def exact(self, size: int) -> Callable[[], torch.Tensor]:
        return self.by(FusedExact(self.steps, size))


def outcome(check: Callable[..., None], *arguments: Any) -> str:
    try:
        check(*arguments)
    except AssertionError as error:
        return str(error) or "failed"
    return ""


def run_checks(device: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    cases = list(itertools.product(kernel_checks.DTYPES, kernel_checks.CASES))
    for check in kernel_checks.CHECKS:
        said = found.setdefault(check.__name__, {})
        for dtype, (num_reqs, size) in cases:
            numbers = kernel_checks.Numbers(device, dtype, seed=num_reqs)
            name = f"{dtype}, {size}, B {num_reqs}"
            said[name] = outcome(check, numbers, num_reqs, size)
    found["check_blocks"] = {
        f"B {num_reqs}": outcome(check_block, num_reqs, device)
        for num_reqs in BLOCK_BATCHES
    }
    return found


def check_block(num_reqs: int, device: str) -> None:
    """A whole rollout, in float32, where sums in another order change no token."""
    case = Case(SMALL, num_reqs, FEW_DRAFTS, torch.float32, device)
    expected = case.by_torch()
    assert torch.equal(case.fused()(), expected), "another draft"
    for size in POOLS:
        assert torch.equal(case.exact(size)(), expected), f"another, of {size} guesses"
    moved = expected[:, 1:] != case.base[:, 1:].argmax(-1)
    assert moved.float().mean() > 0.2, "the correction moves too few winners"


def captured(function: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
    """A CUDA graph of a call, and where its result comes out."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def milliseconds(graphs: dict[str, Any]) -> dict[str, float]:
    """Median time of each graph's replay, taken in turns."""
    seen: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(REPEATS):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            seen[name].append(start.elapsed_time(end))
    return {name: statistics.median(times) for name, times in seen.items()}


def time_rollouts(num_reqs: int) -> dict[str, Any]:
    case = Case(QWEN3_8B, num_reqs, NUM_DRAFTS, torch.bfloat16, "cuda")
    lm_head = case.table.clone()
    rows = case.hidden.flatten(0, 1)
    graphs: dict[str, Any] = {}
    results: dict[str, torch.Tensor] = {}
    work: dict[str, Callable[[], torch.Tensor]] = {
        "lm_head alone": lambda: F.linear(rows, lm_head),
        "dense": case.by_torch,
        "fused": case.fused(),
        "exact": case.exact(GUESSES),
    }
    for name, function in work.items():
        graphs[name], results[name] = captured(function)
    times = milliseconds(graphs)
    # Once more, on what has changed since it was captured.
    case.base.copy_(case.base.flip(0))
    case.bonus.copy_(case.bonus.flip(0))
    for graph in graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    # Sums in another order: in bfloat16 a near tie may go the other way.
    dense = results["dense"]
    same = {
        name: (results[name] == dense).float().mean().item()
        for name in ("fused", "exact")
    }
    return {"num_reqs": num_reqs, "ms": times, "as_dense": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="file to write, - for standard output")
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("--no-timing", action="store_true")
    given = parser.parse_args()
    device = "cpu" if given.interpret else "cuda"
    with torch.inference_mode():
        checks = run_checks(device)
        timed = not given.interpret and not given.no_timing
        timings = [time_rollouts(size) for size in TIMED_BATCHES] if timed else []
    failed = sum(bool(said) for cases in checks.values() for said in cases.values())
    report = {
        "device": "Triton's interpreter" if given.interpret else _device_name(),
        "torch": torch.__version__,
        "checks": checks,
        "failed": failed,
        "timings": timings,
    }
    text = json.dumps(report, indent=2)
    if given.json == "-":
        print(text)
    elif given.json:
        Path(given.json).write_text(text + "\n")
    if given.json != "-":
        total = sum(map(len, checks.values()))
        print(f"{report['device']}: {total - failed} of {total} checks held")
        for timing in timings:
            print(timing)
    sys.exit(1 if failed else 0)


def _device_name() -> str:
    name: str = torch.cuda.get_device_name()
    return name


if __name__ == "__main__":
    main()
