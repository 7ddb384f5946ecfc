# SPDX-License-Identifier: Apache-2.0
"""What every method of a comparison does."""

from dataclasses import dataclass, field

from vllm_domino.bench.prompts import Messages
from vllm_domino.bench.result import Collected, Report, machine
from vllm_domino.launch import refuse_ours


@dataclass(frozen=True)
class Work:
    """
    Attributes:
        at_once: Requests at once; each number is measured.
        arguments: More of the engine's arguments, as ``vllm serve`` takes them.
    """

    target: str
    prompts: list[Messages]
    at_once: list[int]
    max_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = False
    repeats: int = 3
    arguments: list[str] = field(default_factory=list)


def arguments(work: Work, engines: int) -> list[str]:
    """The engine's arguments; of what is given twice the last wins, the user's."""
    refuse_ours(work.arguments)
    ours = ["--max-num-seqs", str(max(work.at_once))]
    # A round must not find the one before it in the cache; all engines share a GPU.
    ours += ["--no-enable-prefix-caching"]
    ours += ["--gpu-memory-utilization", str(round(0.9 / engines, 3))]
    return [*ours, *work.arguments]


def report_of(work: Work, prompts: str, command: str, collected: Collected) -> Report:
    """
    Args:
        prompts: What the prompts are called.
        command: What was typed.
    """
    return Report(
        command,
        work.target,
        prompts,
        machine(),
        collected.rows(),
        len(work.prompts),
        # Sampled outputs differ by chance.
        collected.same_outputs() if work.temperature == 0 else {},
    )
