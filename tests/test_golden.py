# SPDX-License-Identifier: Apache-2.0
"""Trained pairs in both runners: outputs, drafts and vLLM's counters are golden."""

from typing import Any

import pytest

from tests.engines import PAIRS, RUNNERS, Pair, domino_job, run_engine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.support("trained pairs: outputs, every draft, counters by position"),
]


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=PAIRS, ids=lambda pair: pair.folder.name)
def pair(request: pytest.FixtureRequest) -> Pair:
    chosen: Pair = request.param
    return chosen


@pytest.fixture
def result(pair: Pair, runner: str) -> dict[str, Any]:
    tokens = pair.golden["max_tokens"]
    return run_engine(
        domino_job(pair.target, pair.draft, [pair.prompts], tokens), runner
    )


def test_the_runner_drafts_with_its_own_domino_class(
    result: dict[str, Any], runner: str
) -> None:
    expected = {"v1": "v1.DominoProposer", "v2": "v2.DominoSpeculator"}[runner]
    assert result["proposer"] == f"vllm_domino.proposers.{expected}"


def test_outputs_are_the_targets_own(result: dict[str, Any], pair: Pair) -> None:
    assert result["batches"][0] == pair.golden["outputs"]


def test_every_drafted_block_is_the_golden_one(
    result: dict[str, Any], pair: Pair
) -> None:
    golden = {(s["prompt"], s["context"]): s for s in pair.golden["steps"]}
    verified = [b for b in result["blocks"] if (b["request"], b["context"]) in golden]
    # Each golden step is drafted once; what else is drafted follows a request's end.
    assert len(verified) == len(golden)
    for block in verified:
        step = golden[block["request"], block["context"]]
        assert block["bonus"] == step["bonus"]
        assert block["draft"] == step["draft"]
    ends = [len(prompt) + pair.golden["max_tokens"] - 1 for prompt in pair.prompts]
    for block in result["blocks"]:
        if block not in verified:
            assert block["context"] >= ends[block["request"]]


def test_vllms_counters_are_the_golden_totals(
    result: dict[str, Any], pair: Pair
) -> None:
    golden, counters = pair.golden, result["counters"]
    assert counters["num_drafts"] == golden["drafts"]
    assert counters["num_draft_tokens"] == golden["drafts"] * 8
    assert counters["num_accepted_tokens"] == golden["accepted"]
    assert counters["num_accepted_tokens_per_pos"] == golden["accepted_per_pos"]
