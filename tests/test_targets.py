# SPDX-License-Identifier: Apache-2.0
"""Targets of other kinds, and drafts of a reduced vocabulary."""

from pathlib import Path
from typing import Any

import pytest

from tests import targets
from tests.drafts import random_unshifted_draft, reduced_vocab_draft
from tests.engines import BYTES4, domino_job, run_engine
from tests.reference import Reference

pytestmark = [pytest.mark.engine, pytest.mark.slow]

RUNNERS = ("v1", "v2")
PROMPTS = BYTES4.prompts[:6]
MAX_TOKENS = 12
NUM_DRAFTS = 7


def assert_drafts_are_the_references(
    target: Path, draft: Path, result: dict[str, Any], num_drafts: int
) -> None:
    reference = Reference(target, draft)
    compared = 0
    for block in result["blocks"]:
        number = block["request"]
        sequence = PROMPTS[number] + result["batches"][0][number]
        if block["context"] >= len(sequence):
            continue
        context = sequence[: block["context"]]
        expected = reference.draft(context, block["bonus"], num_drafts)
        assert block["draft"] == expected.tokens
        compared += 1
    assert compared > 20


def assert_outputs_are_plain(job: dict[str, Any], runner: str) -> dict[str, Any]:
    result = run_engine(job, runner)
    plain = run_engine(job | {"speculative_config": None, "record": False}, "v1")
    for kind in ("batches", "cases"):
        assert result[kind] == plain[kind]
    return result


@pytest.mark.support(param="feature")
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("feature", "make"),
    [("target: Llama", targets.llama), ("target: Qwen3-MoE", targets.qwen3_moe)],
)
def test_another_architecture(
    feature: str, make: Any, runner: str, tmp_path: Path
) -> None:
    target = make(tmp_path / "target")
    draft = random_unshifted_draft(BYTES4.draft, tmp_path / "draft")
    job = domino_job(target, draft, [PROMPTS], MAX_TOKENS)
    result = assert_outputs_are_plain(job, runner)
    assert_drafts_are_the_references(target, draft, result, NUM_DRAFTS)


@pytest.mark.support("target: int8 weights and activations (compressed-tensors)")
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_quantised_target(runner: str, tmp_path: Path) -> None:
    target = targets.quantised(BYTES4.target, tmp_path / "target")
    # vLLM's int8 kernels for CPUs want 16-bit activations.
    job = domino_job(
        target,
        BYTES4.draft,
        [PROMPTS],
        40,
        record=False,
        engine={"dtype": "bfloat16"},
    )
    result = assert_outputs_are_plain(job, runner)
    counters = result["counters"]
    # The draft was trained for these weights before they were rounded.
    assert counters["num_accepted_tokens"] / counters["num_drafts"] > 2


@pytest.mark.support("LoRA on the target")
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_lora_adapter_on_the_target(runner: str, tmp_path: Path) -> None:
    adapter = targets.lora_adapter(BYTES4.target, tmp_path / "adapter")
    greedy = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}
    case = {"prompts": PROMPTS, "sampling": [greedy] * len(PROMPTS)}
    job: dict[str, Any] = {
        "target": str(BYTES4.target),
        "speculative_config": {"method": "domino", "model": str(BYTES4.draft)},
        "cases": {"with": case | {"lora": str(adapter)}, "without": case},
        "engine": {"enable_lora": True, "max_lora_rank": 8},
    }
    if runner == "v2":
        # vLLM's CPU kernels for an adapted lm_head want one row a request, and the V2
        # runner gives them one a verified token, whatever the method.
        job["engine"]["lora_target_modules"] = list(targets.ADAPTED)
    result = assert_outputs_are_plain(job, runner)
    assert result["cases"]["with"] != result["cases"]["without"]
    golden = [output[:30] for output in BYTES4.golden["outputs"][: len(PROMPTS)]]
    found = [row["completions"][0]["tokens"] for row in result["cases"]["without"]]
    assert found == golden


@pytest.mark.support("draft of a reduced vocabulary (d2t)")
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_a_reduced_vocabulary(runner: str, method: str, tmp_path: Path) -> None:
    draft = reduced_vocab_draft(BYTES4.draft, BYTES4.target, tmp_path / "draft")
    settings = {"draft_sample_method": method}
    job = domino_job(BYTES4.target, draft, [PROMPTS], 30, settings=settings)
    result = run_engine(job, runner)
    golden = [output[:30] for output in BYTES4.golden["outputs"][: len(PROMPTS)]]
    assert result["batches"][0] == golden
    assert_drafts_are_the_references(BYTES4.target, draft, result, 8)
    counters = result["counters"]
    assert counters["num_accepted_tokens"] / counters["num_drafts"] > 1.5
