# SPDX-License-Identifier: Apache-2.0
"""Sampled text has the target's distribution: tokens 2 to 4 of many requests, with
Domino and without, are draws from one distribution."""

from typing import Any

import pytest
import torch

from tests.engines import BYTES4, run_engine
from tests.statistics import SMALLEST_P, two_sample_p_value

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# In Triton's interpreter a step takes seconds.
DRAWS = {"v1": 20_000, "v2": 300}
PROMPT = BYTES4.prompts[1]
METHODS = ("greedy", "probabilistic")
FILTERS: dict[str, dict[str, Any]] = {
    "no filter": {},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 8": {"top_k": 8},
}
SETTINGS = {
    f"temperature {temperature}, {name}": {"temperature": temperature, **given}
    for temperature in (0.3, 0.8, 1.5)
    for name, given in FILTERS.items()
}
CELLS = [
    (runner, name, method, f"{name}, {method} drafts")
    for method in METHODS
    for name in SETTINGS
    for runner in DRAWS
]


def _counts(runner: str, count: int, method: str | None) -> dict[str, dict[str, int]]:
    job: dict[str, Any] = {
        "target": str(BYTES4.target),
        "draws": {
            name: {"prompt": PROMPT, "count": count, "sampling": SETTINGS[name]}
            for name in SETTINGS
        },
        "engine": {
            "max_num_seqs": 256 if runner == "v1" else 16,
            "enable_prefix_caching": True,
            # Not the plain run's: they must not share their noise.
            "seed": 1 if method is None else 2 + METHODS.index(method),
        },
    }
    if method is not None:
        job["speculative_config"] = {
            "method": "domino",
            "model": str(BYTES4.draft),
            "draft_sample_method": method,
        }
    result = run_engine(job, runner)
    if method is not None:
        assert result["counters"]["num_accepted_tokens"] > 0
    draws: dict[str, dict[str, int]] = result["draws"]
    return draws


def _p_value(first: dict[str, int], second: dict[str, int]) -> float:
    runs = sorted(first.keys() | second.keys())
    return two_sample_p_value(
        torch.tensor([first.get(run, 0) for run in runs], dtype=torch.float64),
        torch.tensor([second.get(run, 0) for run in runs], dtype=torch.float64),
    )


@pytest.mark.support(param="feature")
@pytest.mark.parametrize(("runner", "name", "method", "feature"), CELLS)
def test_tokens_2_to_4_are_plain_decodings(
    runner: str, name: str, method: str, feature: str
) -> None:
    # Plain decoding is the V1 runner's in both cases, and always of many draws.
    plain = _counts("v1", DRAWS["v1"], None)[name]
    found = _counts(runner, DRAWS[runner], method)[name]
    assert sum(found.values()) == DRAWS[runner]
    p = _p_value(plain, found)
    print(f"{feature}, {runner}: p = {p:.3f}")
    # Bonferroni: one of all cells may be as unlikely as that by chance.
    assert p > SMALLEST_P / len(CELLS)


def test_the_test_can_tell() -> None:
    """Another temperature, or another filter, is another distribution."""
    plain = _counts("v1", DRAWS["v1"], None)
    drafted = _counts("v1", DRAWS["v1"], "greedy")
    for name, other in (
        ("temperature 0.8, no filter", "temperature 0.8, top_p 0.9"),
        ("temperature 0.3, no filter", "temperature 0.8, no filter"),
    ):
        assert _p_value(plain[name], drafted[other]) < 1e-9
