# SPDX-License-Identifier: Apache-2.0
"""Sampled requests: how much is accepted is what the target's and the draft's own
probabilities say, as an independent oracle computes them."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.engines import PAIRS, Pair, domino_job, run_engine
from tests.reference import Reference

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TEMPERATURE = 1.0
MAX_TOKENS = 60
STANDARD_ERRORS = 3
METHODS = ("greedy", "probabilistic")


@pytest.fixture(params=PAIRS, ids=lambda pair: pair.folder.name)
def pair(request: pytest.FixtureRequest) -> Pair:
    chosen: Pair = request.param
    return chosen


def _result(pair: Pair, method: str, runner: str, rounds: int) -> dict[str, Any]:
    job = domino_job(
        pair.target,
        pair.draft,
        [pair.prompts] * rounds,
        MAX_TOKENS,
        settings={"draft_sample_method": method},
        temperature=TEMPERATURE,
        engine={"seed": 3},
    )
    return run_engine(job, runner)


@pytest.mark.support(param="feature")
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize(
    ("feature", "method"),
    [(f"sampled, {m} drafts: acceptance is the oracle's", m) for m in METHODS],
)
def test_acceptance_is_what_the_oracle_predicts(
    pair: Pair, feature: str, method: str, runner: str
) -> None:
    """Each acceptance is a coin whose odds are known once what precedes it is. The sum
    of the coins less the sum of the odds has a known variance."""
    result = _result(pair, method, runner, rounds=1)
    reference = Reference(pair.target, pair.draft)
    accepted, expected, variance = 0, 0.0, 0.0
    for sequence, blocks in _by_request(pair, result):
        for block, following in pairwise(blocks):
            count = following["context"] - block["context"] - 1
            odds = _odds(reference, sequence[: block["context"]], block, method)
            # Positions that were tried: those accepted, and the one that was not.
            tried = odds[: count + 1]
            accepted += count
            expected += float(tried.sum())
            variance += float((tried * (1 - tried)).sum())
    assert variance > 20
    assert abs(accepted - expected) < STANDARD_ERRORS * variance**0.5


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_probabilistic_drafts_are_accepted_more_often(pair: Pair, runner: str) -> None:
    rounds = {"v1": 8, "v2": 1}[runner]
    tau = {}
    for method in METHODS:
        counters = _result(pair, method, runner, rounds)["counters"]
        tau[method] = 1 + counters["num_accepted_tokens"] / counters["num_drafts"]
    print(f"tau at temperature {TEMPERATURE}, {pair.folder.name}, {runner}: {tau}")
    assert tau["probabilistic"] > tau["greedy"]


def _by_request(pair: Pair, result: dict[str, Any]) -> list[Any]:
    """(prompt and output, blocks in order) of each request."""
    sequences = [
        prompt + output
        for prompt, output in zip(pair.prompts, result["batches"][0], strict=True)
    ]
    return [
        (
            sequence,
            [
                block
                for block in result["blocks"]
                if block["request"] == number and block["context"] < len(sequence)
            ],
        )
        for number, sequence in enumerate(sequences)
    ]


@torch.no_grad()
def _odds(
    reference: Reference, context: list[int], block: dict[str, Any], method: str
) -> torch.Tensor:
    """(K,) of each draft's acceptance, if those before it are accepted."""
    bonus, drafts = block["bonus"], block["draft"]
    tokens = torch.tensor([[*context, bonus, *drafts]])
    logits = reference.target(tokens).logits[0, len(context) : -1].double()
    target = (logits / TEMPERATURE).softmax(-1)
    if method == "greedy":
        return target.gather(1, torch.tensor(drafts)[:, None]).squeeze(1)
    drafted = reference.logits(context, bonus, drafts).double() / TEMPERATURE
    return torch.minimum(target, drafted.softmax(-1)).sum(-1)
