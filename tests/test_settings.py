# SPDX-License-Identifier: Apache-2.0
"""Engines set up in other ways: outputs stay plain decoding's, and drafts the golden
ones, which vLLM's own counters tell."""

from typing import Any

import pytest

from tests.engines import PAIRS, Pair, domino_job, run_engine
from tests.features import PAIR
from tests.reference import Reference

pytestmark = [pytest.mark.engine]

# vLLM binds each rank to cores; this machine has two.
TWO_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
RUNNERS = ["v1", pytest.param("v2", marks=pytest.mark.slow)]


SLOW = pytest.mark.slow


def golden_job(pair: Pair = PAIR, **extra: Any) -> dict[str, Any]:
    job = domino_job(
        pair.target, pair.draft, [pair.prompts], pair.golden["max_tokens"], **extra
    )
    return job | {"record": False}


def assert_golden(result: dict[str, Any], pair: Pair = PAIR) -> None:
    golden, counters = pair.golden, result["counters"]
    assert result["batches"][0] == golden["outputs"]
    assert counters["num_drafts"] == golden["drafts"]
    assert counters["num_accepted_tokens"] == golden["accepted"]
    assert counters["num_accepted_tokens_per_pos"] == golden["accepted_per_pos"]


@pytest.mark.slow
@pytest.mark.support(param="feature")
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize(
    ("feature", "engine"),
    [
        ("chunked prefill, 256 tokens a step", {"max_num_batched_tokens": 256}),
        ("async scheduling", {"async_scheduling": True}),
    ],
)
def test_drafts_and_outputs_are_golden(
    feature: str, engine: dict[str, Any], runner: str
) -> None:
    slots = {"max_num_seqs": 4} if "max_num_batched_tokens" in engine else {}
    assert_golden(run_engine(golden_job(engine=engine | slots), runner))


@pytest.mark.slow
@pytest.mark.support(param="feature")
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize(
    ("feature", "engine"),
    [
        # So few that a step verifies only part of a draft, too.
        (
            "chunked prefill, 64 tokens a step",
            {"max_num_batched_tokens": 64, "max_num_seqs": 4},
        ),
        (
            "preemption",
            {"num_gpu_blocks_override": 14, "block_size": 32, "max_model_len": 256},
        ),
    ],
)
def test_outputs_are_golden_where_drafts_are_cut_or_lost(
    feature: str, engine: dict[str, Any], runner: str
) -> None:
    result = run_engine(golden_job(engine=engine) | {"record": True}, runner)
    assert result["batches"][0] == PAIR.golden["outputs"]
    if feature == "preemption":
        assert result["counters"]["num_preemptions"] > 0
    golden = {(s["prompt"], s["context"]): s["draft"] for s in PAIR.golden["steps"]}
    places = [(block["request"], block["context"]) for block in result["blocks"]]
    compared = 0
    for place, block in zip(places, result["blocks"], strict=True):
        if place in golden:
            assert block["draft"] == golden[place]
            compared += 1
    assert compared > 200


@pytest.mark.support(param="feature")
@pytest.mark.parametrize(
    ("feature", "settings", "runner"),
    [
        # What V1 does on a CPU unless asked otherwise is "fused".
        ("head: dense", {"head": "dense"}, "v1"),
        ("head: fused", {"head": "fused"}, "v1"),
        ("head: pool", {"head": "pool", "pool_size": 288}, "v1"),
        pytest.param(
            "head: pool", {"head": "pool", "pool_size": 288}, "v2", marks=SLOW
        ),
        pytest.param("head: fused", {"head": "fused"}, "v2", marks=SLOW),
        pytest.param("head: dense", {"head": "dense"}, "v2", marks=SLOW),
        ("project_embeddings", {"project_embeddings": True}, "v1"),
        pytest.param(
            "project_embeddings",
            {"project_embeddings": True},
            "v2",
            marks=SLOW,
        ),
    ],
)
def test_a_faster_head_drafts_the_same(
    feature: str, settings: dict[str, Any], runner: str
) -> None:
    # Every block of the pair: the counters are those of the golden drafts.
    assert_golden(run_engine(golden_job(settings=settings), runner))


@pytest.mark.support("head: exact")
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.folder.name)
def test_an_exact_head_drafts_the_same(pair: Pair, runner: str) -> None:
    # Few enough that many guesses are wrong.
    settings = {"head": "exact", "pool_size": 4}
    assert_golden(run_engine(golden_job(pair, settings=settings), runner), pair)


@pytest.mark.slow
@pytest.mark.support("tensor parallel 2")
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_two_ranks_draft_as_one(runner: str, method: str) -> None:
    job = golden_job(
        engine={"tensor_parallel_size": 2},
        settings={"draft_sample_method": method},
        in_process=False,
        env=TWO_RANKS,
    )
    assert_golden(run_engine(job, runner))


@pytest.mark.slow
def test_two_ranks_sample_as_one() -> None:
    """Seeded, with probabilistic drafts, for which the ranks gather whole logits."""
    sampling = {"temperature": 0.8, "max_tokens": 24, "ignore_eos": True}
    prompts = PAIR.prompts[:4]
    case = {
        "prompts": prompts,
        "sampling": [sampling | {"seed": 3 + i} for i in range(len(prompts))],
    }
    jobs = [
        {
            "target": str(PAIR.target),
            "cases": {"sampled": case},
            "speculative_config": {
                "method": "domino",
                "model": str(PAIR.draft),
                "draft_sample_method": "probabilistic",
            },
            "engine": {"tensor_parallel_size": ranks},
            "in_process": False,
            "env": TWO_RANKS if ranks > 1 else {},
        }
        for ranks in (1, 2)
    ]
    one, two = (run_engine(job, "v1") for job in jobs)
    assert [row["completions"] for row in one["cases"]["sampled"]] == [
        row["completions"] for row in two["cases"]["sampled"]
    ]
    assert two["counters"]["num_accepted_tokens"] > 0


@pytest.mark.support(param="feature")
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("feature", "block"),
    [
        ("fewer drafts than the trained block, short block", "short"),
        ("fewer drafts than the trained block, trained block", "trained"),
    ],
)
def test_fewer_drafts_than_trained_are_the_references(
    feature: str, block: str, runner: str
) -> None:
    num_drafts, tokens = 3, 24
    job = domino_job(
        PAIR.target,
        PAIR.draft,
        [PAIR.prompts],
        tokens,
        settings={"num_speculative_tokens": num_drafts, "draft_block": block},
    )
    result = run_engine(job, runner)
    assert result["batches"][0] == [out[:tokens] for out in PAIR.golden["outputs"]]
    reference = Reference(PAIR.target, PAIR.draft, trained_block=block == "trained")
    compared = 0
    for found in result["blocks"]:
        sequence = (
            PAIR.prompts[found["request"]] + result["batches"][0][found["request"]]
        )
        if found["context"] >= len(sequence):
            continue
        context = sequence[: found["context"]]
        expected = reference.draft(context, found["bonus"], num_drafts)
        assert found["draft"] == expected.tokens
        compared += 1
    assert compared > 50
