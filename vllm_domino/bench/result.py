# SPDX-License-Identifier: Apache-2.0
"""What ``bench offline`` and ``bench serve`` find, in one form."""

import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PLAIN = "none"


@dataclass
class Run:
    """One repeat of one method with so many requests at once.

    Attributes:
        tokens_per_s: Of output.
        ttft, tpot, itl: Percentiles in seconds, by name ("p50", "p99"): to the first
            token, from token to token of a request on average, and between messages
            of a stream (``bench serve``).
        drafts, drafted, accepted: Blocks, tokens in them, and tokens accepted.
        accepted_at: Of these, by their position in the block.
        split: Seconds of a step in verifying, the draft's backbone and its head, where
            they can be told apart.
    """

    tokens_per_s: float
    ttft: dict[str, float]
    tpot: dict[str, float]
    itl: dict[str, float] = field(default_factory=dict)
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    split: dict[str, float] = field(default_factory=dict)


@dataclass
class Row:
    """One method with so many requests at once, over its repeats."""

    method: str
    at_once: int
    runs: list[Run]

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(run.tokens_per_s for run in self.runs)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a step, the bonus token included."""
        drafts = sum(run.drafts for run in self.runs)
        return 1 + sum(run.accepted for run in self.runs) / drafts if drafts else None

    @property
    def accepted_at(self) -> list[float]:
        """Part of the blocks whose draft at each position was accepted."""
        drafts = sum(run.drafts for run in self.runs)
        counts = [run.accepted_at for run in self.runs if run.accepted_at]
        return [sum(column) / drafts for column in zip(*counts, strict=True)]

    def latency(self, name: str, percentile: str) -> float | None:
        """Median over the repeats, in seconds."""
        found = [getattr(run, name).get(percentile) for run in self.runs]
        return None if None in found else statistics.median(found)

    def split(self) -> dict[str, float]:
        """Median seconds of a step by part."""
        names = self.runs[0].split
        return {
            name: statistics.median(run.split[name] for run in self.runs)
            for name in names
        }


@dataclass
class Report:
    """
    Attributes:
        command: What was typed.
        prompts: Set, number and seed.
        same_outputs: How many of each method's greedy outputs were plain decoding's.
        num_prompts: Of how many.
    """

    command: str
    target: str
    prompts: str
    machine: str
    rows: list[Row]
    num_prompts: int
    same_outputs: dict[str, int] = field(default_factory=dict)

    def speed_up(self, row: Row) -> float | None:
        """Over plain decoding with as many at once."""
        plain = [r for r in self.rows if (r.method, r.at_once) == (PLAIN, row.at_once)]
        return row.tokens_per_s / plain[0].tokens_per_s if plain else None

    def as_dict(self) -> dict[str, Any]:
        rows = [
            asdict(row)
            | {
                "tokens_per_s": row.tokens_per_s,
                "speed_up": self.speed_up(row),
                "acceptance_length": row.acceptance_length,
                "accepted_at": row.accepted_at,
            }
            for row in self.rows
        ]
        return asdict(self) | {"rows": rows}


@dataclass
class Collected:
    """What methods did, as their runs end.

    Attributes:
        outputs: Each method's answers, of its first run.
    """

    runs: dict[tuple[str, int], list[Run]] = field(default_factory=dict)
    outputs: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, method: str, at_once: int, run: Run, outputs: list[Any]) -> None:
        self.runs.setdefault((method, at_once), []).append(run)
        self.outputs.setdefault(method, outputs)

    def rows(self) -> list[Row]:
        """In the order in which they first came."""
        return [Row(*name, runs) for name, runs in self.runs.items()]

    def same_outputs(self) -> dict[str, int]:
        """How many of each method's outputs are plain decoding's."""
        plain = self.outputs.get(PLAIN)
        if plain is None:
            return {}
        return {
            method: sum(a == b for a, b in zip(mine, plain, strict=True))
            for method, mine in self.outputs.items()
            if method != PLAIN
        }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """ "p50" and "p99"."""
    if len(values) < 2:
        return dict.fromkeys(("p50", "p99"), values[0]) if values else {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98]}


def machine() -> str:
    """What the figures were measured on."""
    import torch
    import vllm

    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"{torch.get_num_threads()} CPU threads, {platform.machine()}"
    return f"{device}, vLLM {vllm.__version__}, torch {torch.__version__}"
