# SPDX-License-Identifier: Apache-2.0
"""``vllm-domino bench head``: what the head costs beside the lm_head, mode by mode.

Every mode is timed from hidden states to drafted tokens, the lm_head included, in
turns, so that all see the same machine; ratios are to the lm_head's product alone.
"""

import importlib.util
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vllm_domino.bench.head_case import (
    HeadCase,
    Inputs,
    Reads,
    bandwidth_ceiling,
    bytes_read,
    reads,
    weight_bytes,
)
from vllm_domino.errors import DraftConfigError
from vllm_domino.exact import Exact, foresees
from vllm_domino.native import Native, misfit
from vllm_domino.rollouts import Rollout, StepByStep
from vllm_domino.scoring import GUESSES, Dense, Pool
from vllm_domino.steps import Steps

LM_HEAD = "lm_head alone"
DENSE, EXACT, FUSED = "dense", "exact", "fused"
# A mode's drafts: (B, K).
Mode = Callable[[Inputs], torch.Tensor]


@dataclass
class Timing:
    """
    Attributes:
        seconds: Of each repeat.
        weight_bytes: What is read of the weights at least, cache or memory.
        agrees: At what part of the positions the tokens are those of ``dense``.
    """

    mode: str
    weight_bytes: float
    seconds: list[float] = field(default_factory=list)
    agrees: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass
class Result:
    """One shape at one batch size."""

    shape: str
    num_reqs: int
    num_drafts: int
    changed: float
    machine: str
    ceiling_bytes_per_s: float
    floor_bytes: float
    blocks_compared: int
    timings: list[Timing]

    def ratio(self, timing: Timing) -> float:
        """The median over rounds of the time over the lm_head's in the same round."""
        alone = next(t for t in self.timings if t.mode == LM_HEAD)
        rounds = zip(timing.seconds, alone.seconds, strict=True)
        return statistics.median(mine / its for mine, its in rounds)

    @property
    def floor(self) -> float:
        """Seconds in which each weight can be read once."""
        return self.floor_bytes / self.ceiling_bytes_per_s

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "floor_s": self.floor,
            "bytes_per_s": {t.mode: t.weight_bytes / t.median for t in self.timings},
            "medians": {t.mode: t.median for t in self.timings},
            "over_lm_head": {t.mode: self.ratio(t) for t in self.timings},
        }


def modes(
    case: HeadCase, sglang: Path | None, pool_size: int, guesses: int = GUESSES
) -> dict[str, Mode]:
    """Each mode by its name, weights laid out."""
    gates = case.head.project_embeddings(case.embedding)
    steps = Steps(case.head, case.embed)
    projected = Steps(case.head, case.embed, gates)

    def ours(rollout: Rollout) -> Mode:
        def draft(inputs: Inputs) -> torch.Tensor:
            hidden = inputs.hidden[:, : case.size.num_drafts].contiguous()
            base = case.base_logits(inputs.hidden)
            return rollout.draft(hidden, base, inputs.bonus, lambda _, ids: ids)

        return draft

    guesses = min(guesses, len(steps.vocab))
    found = {
        LM_HEAD: lambda inputs: case.base_logits(inputs.hidden),
        DENSE: ours(StepByStep(steps, Dense(steps.vocab))),
        EXACT: ours(Exact(steps, guesses)),
        "exact, embeddings projected": ours(Exact(projected, guesses)),
        f"pool of {pool_size}": ours(StepByStep(steps, Pool(steps.vocab, pool_size))),
    }
    if misfit(steps, case.embedding) is None:
        found[FUSED] = ours(Native(steps, case.embedding))
    if sglang is not None:
        module = load_sglang(sglang)
        gru = case.head.prefix_gru
        found[f"SGLang, pool of {pool_size}"] = theirs(module, case, pool_size, gru)
        stepped = _Gru(gru)
        found[f"SGLang, pool of {pool_size}, GRU stepped"] = theirs(
            module, case, pool_size, stepped
        )
        found["SGLang, whole vocabulary, GRU stepped"] = theirs(
            module, case, 0, stepped
        )
    return found


def _reads(case: HeadCase, mode: str, num_reqs: int) -> Reads:
    drafts, corrected = case.size.num_drafts, case.size.num_drafts - case.size.prefix
    if mode == LM_HEAD:
        return {"lm_head": 1}
    if "projected" in mode:
        return reads(case, 1, 0)
    if mode == FUSED:
        return reads(case, corrected, 0)
    if mode == EXACT:
        return reads(case, 1, 1 if foresees(num_reqs, drafts) else drafts)
    return reads(case, 0 if "pool" in mode else corrected, drafts)


def load_sglang(folder: Path) -> ModuleType:
    """SGLang's published rollout, from where its wheel was unpacked."""
    path = folder / "sglang" / "srt" / "speculative" / "domino_utils.py"
    if not path.is_file():
        raise DraftConfigError(
            f"{path} is not there. Unpack SGLang's wheel and give the folder that then "
            "has sglang/ in it: pip download --no-deps sglang; unzip sglang-*.whl"
        )
    spec = importlib.util.spec_from_file_location("sglang_domino_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Gru:
    """Its first two tokens one by one: of both at once torch makes, on a CPU and in
    bfloat16, a copy of the weights that takes longer than all else (128 ms)."""

    def __init__(self, gru: torch.nn.GRU) -> None:
        self.gru = gru

    def __getattr__(self, name: str) -> Any:
        return getattr(self.gru, name)

    def __call__(self, embedded: torch.Tensor) -> tuple[None, torch.Tensor]:
        weights = (self.gru.weight_ih_l0, self.gru.weight_hh_l0)
        state = embedded.new_zeros(len(embedded), self.gru.hidden_size)
        for step in embedded.unbind(1):
            state = torch.gru_cell(step, state, *weights)
        return None, state[None]


def theirs(module: ModuleType, case: HeadCase, pool_size: int, gru: Any) -> Mode:
    embedding = torch.nn.Embedding.from_pretrained(case.embedding)

    def draft(inputs: Inputs) -> torch.Tensor:
        tokens: torch.Tensor = module.domino_greedy_rollout(
            draft_hidden=inputs.hidden,
            bonus_tokens=inputs.bonus,
            target_embedding=embedding,
            lm_head_weight=case.lm_head,
            prefix_gru=gru,
            embed_proj=case.head.embed_proj,
            vocab_size=case.size.shape.vocab_size,
            shift_label=True,
            candidate_pool_size=pool_size,
            in_cuda_graph=False,
        )
        return tokens

    return draft


@torch.inference_mode()
def measure(
    name: str,
    case: HeadCase,
    num_reqs: int,
    repeats: int,
    blocks: int,
    sglang: Path | None,
    pool_size: int,
    console: Console,
) -> Result:
    """Times every mode in turns, and compares tokens on ``blocks`` blocks."""
    found = modes(case, sglang, pool_size)
    timings = {
        mode: Timing(mode, bytes_read(case, _reads(case, mode, num_reqs)))
        for mode in found
    }
    rounds = -(-blocks // num_reqs)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"{name}, B {num_reqs}", total=repeats + 1 + rounds)
        for repeat in range(repeats + 1):
            inputs = case.inputs(num_reqs)
            for mode, draft in found.items():
                start = time.perf_counter()
                draft(inputs)
                if repeat:  # the first is warm-up
                    timings[mode].seconds.append(time.perf_counter() - start)
            progress.advance(task)
        compared = _compare(found, timings, case, num_reqs, rounds, progress, task)
    return Result(
        shape=name,
        num_reqs=num_reqs,
        num_drafts=case.size.num_drafts,
        changed=case.changed,
        machine=f"{platform.processor() or platform.machine()}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}",
        ceiling_bytes_per_s=bandwidth_ceiling(),
        floor_bytes=sum(weight_bytes(case).values()),
        blocks_compared=compared,
        timings=list(timings.values()),
    )


def _compare(
    found: dict[str, Mode],
    timings: dict[str, Timing],
    case: HeadCase,
    num_reqs: int,
    rounds: int,
    progress: Progress,
    task: Any,
) -> int:
    same = dict.fromkeys(found, 0)
    positions = 0
    for _ in range(rounds):
        inputs = case.inputs(num_reqs)
        expected = found[DENSE](inputs)
        positions += expected.numel()
        for mode, draft in found.items():
            if mode not in (LM_HEAD, DENSE):
                same[mode] += int((draft(inputs) == expected).sum())
        progress.advance(task)
    for mode, count in same.items():
        if mode not in (LM_HEAD, DENSE) and positions:
            timings[mode].agrees = count / positions
    return rounds * num_reqs


def table(results: list[Result]) -> Table:
    found = Table(
        title=f"{results[0].shape}: hidden states to drafts, the lm_head included",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in ("B", "mode", "ms", "range", "over lm_head", "GB/s", "as dense"):
        found.add_column(column, justify="left" if column == "mode" else "right")
    for result in results:
        for timing in result.timings:
            low, high = min(timing.seconds), max(timing.seconds)
            found.add_row(
                str(result.num_reqs),
                timing.mode,
                f"{timing.median * 1e3:.1f}",
                f"{low * 1e3:.1f} - {high * 1e3:.1f}",
                f"{result.ratio(timing):.2f}x",
                f"{timing.weight_bytes / timing.median / 1e9:.1f}",
                "" if timing.agrees is None else f"{timing.agrees:.2%}",
            )
        found.add_section()
    return found


def as_json(results: list[Result]) -> str:
    return json.dumps([result.as_dict() for result in results], indent=2)


def plot(results: list[Result], path: Path) -> None:
    """Bars of each mode over the lm_head, a group a batch size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.5))
    names = [t.mode for t in results[0].timings if t.mode != LM_HEAD]
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        heights = [
            result.ratio(next(t for t in result.timings if t.mode == name))
            for result in results
        ]
        places = [group + i * width for group in range(len(results))]
        axes.bar(places, heights, width, label=name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(
        [group + 0.4 - width / 2 for group in range(len(results))],
        [f"{result.shape}, B {result.num_reqs}" for result in results],
    )
    axes.set_ylabel("time over the lm_head alone")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
