# SPDX-License-Identifier: Apache-2.0
"""Greedy requests with everything that vLLM lets a request ask for: with Domino each
comes out as in plain decoding, token for token."""

from typing import Any

import pytest

from tests.engines import BYTES4, run_engine
from tests.features import BLOCK_SIZE, CASES, GREEDY_ROWS, MAX_MODEL_LEN, PAIR
from tests.support import not_run

pytestmark = pytest.mark.engine

LOGPROB_TOLERANCE = 1e-3
RUNNERS = ["v1", pytest.param("v2", marks=pytest.mark.slow)]

for _runner in ("v1", "v2"):
    for _parameter in ("min_p", "logit_bias"):
        not_run(
            _parameter,
            _runner,
            "vLLM itself refuses it with any speculative method",
        )


def _job() -> dict[str, Any]:
    return {
        "target": str(PAIR.target),
        "cases": CASES,
        "engine": {
            "skip_tokenizer_init": False,
            # A byte tokenizer; both pairs have that vocabulary.
            "tokenizer": str(BYTES4.target),
            "max_model_len": MAX_MODEL_LEN,
            "max_num_seqs": 8,
            "block_size": BLOCK_SIZE,
            "enable_prefix_caching": True,
            "async_scheduling": True,
        },
    }


def plain() -> dict[str, Any]:
    return run_engine(_job(), "v1")


def with_domino(runner: str) -> dict[str, Any]:
    settings = {"method": "domino", "model": str(PAIR.draft)}
    return run_engine(_job() | {"speculative_config": settings}, runner)


@pytest.mark.support(param="case")
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("case", CASES)
def test_output_is_plain_decodings(case: str, runner: str) -> None:
    rows = GREEDY_ROWS.get(case, slice(None))
    expected = plain()["cases"][case][rows]
    found = with_domino(runner)["cases"][case][rows]
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours["completions"]) == len(theirs["completions"])
        for mine, wanted in zip(
            ours["completions"], theirs["completions"], strict=True
        ):
            for field in ("tokens", "text", "finish_reason", "stop_reason"):
                assert mine[field] == wanted[field], field
            assert_logprobs_equal(mine["logprobs"], wanted["logprobs"])
        assert_logprobs_equal(ours["prompt_logprobs"], theirs["prompt_logprobs"])


def assert_logprobs_equal(found: Any, expected: Any) -> None:
    if expected is None:
        assert found is None
        return
    assert len(found) == len(expected) > 0
    for mine, wanted in zip(found, expected, strict=True):
        assert mine == pytest.approx(wanted, abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("runner", RUNNERS)
def test_the_cases_are_what_they_say(runner: str) -> None:
    """Each did something: the prefix was cached, the stop stopped, drafts were used."""
    result = with_domino(runner)
    cases = result["cases"]
    for name, hit in (("greedy", False), ("prefix caching, hit", True)):
        long_prompts = [
            row
            for row, prompt in zip(cases[name], CASES[name]["prompts"], strict=True)
            # vLLM computes a drafting request's last cached block again.
            if len(prompt) > 2 * BLOCK_SIZE
        ]
        assert len(long_prompts) > 1
        assert all((row["cached_tokens"] > 0) == hit for row in long_prompts)
    greedy = _tokens(cases["greedy"])
    changed = {
        name
        for name in ("repetition penalty", "presence penalty", "bad_words")
        if _tokens(cases[name]) != greedy
    }
    assert changed == {"repetition penalty", "presence penalty", "bad_words"}
    assert any(
        row["completions"][0]["stop_reason"] == "self" for row in cases["stop strings"]
    )
    for row in cases["structured output, regex"]:
        assert row["completions"][0]["text"][-4] == "-"
    assert result["counters"]["num_accepted_tokens"] > 0


def _tokens(rows: list[dict[str, Any]]) -> list[list[int]]:
    return [row["completions"][0]["tokens"] for row in rows]
