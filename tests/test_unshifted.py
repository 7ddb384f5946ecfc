# SPDX-License-Identifier: Apache-2.0
"""A draft of the other layout (``shift_label: false``, no pure prefix) against an
independent drafter: tokens, hidden states, shorter blocks, one request and sixteen."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafts import random_unshifted_draft
from tests.engines import BYTES4, RUNNERS, domino_job, run_engine
from tests.reference import Reference

pytestmark = [
    pytest.mark.engine,
    pytest.mark.support("shift_label false, no pure prefix: drafts and hidden states"),
]

TRAINED_K = 7  # block 8 without shift
SHORT_K = 3
MAX_TOKENS = 8
RELATIVE = 1e-5


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unshifted") / "draft"
    return random_unshifted_draft(BYTES4.draft, folder)


@pytest.fixture(scope="module")
def reference(draft: Path) -> Reference:
    return Reference(BYTES4.target, draft)


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _job(draft: Path, num_drafts: int) -> dict[str, Any]:
    # All sixteen at once, then two of them alone.
    batches = [BYTES4.prompts, [BYTES4.prompts[0]], [BYTES4.prompts[7]]]
    return domino_job(
        BYTES4.target,
        draft,
        batches,
        MAX_TOKENS,
        settings={"num_speculative_tokens": num_drafts},
        record_hidden=True,
    )


def _sequences(result: dict[str, Any]) -> list[list[int]]:
    """Prompt and output of each request, in the order they were submitted."""
    batches = [BYTES4.prompts, [BYTES4.prompts[0]], [BYTES4.prompts[7]]]
    return [
        prompt + output
        for prompts, outputs in zip(batches, result["batches"], strict=True)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


@pytest.mark.parametrize("num_drafts", [TRAINED_K, SHORT_K])
def test_drafts_are_the_references(
    draft: Path, reference: Reference, runner: str, num_drafts: int
) -> None:
    result = run_engine(_job(draft, num_drafts), runner)
    sequences = _sequences(result)
    alone = compared = 0
    for block in result["blocks"]:
        sequence = sequences[block["request"]]
        if block["context"] >= len(sequence):
            continue  # drafted past the last token that was asked for
        context = sequence[: block["context"]]
        expected = reference.draft(context, block["bonus"], num_drafts)
        assert block["bonus"] == sequence[block["context"]]
        assert block["draft"] == expected.tokens
        compared += 1
        alone += block["request"] >= len(BYTES4.prompts)
    assert compared > 100
    assert alone > 10
    assert any(len(set(block["draft"])) > 1 for block in result["blocks"])


def test_outputs_are_the_targets_own(draft: Path, runner: str) -> None:
    outputs = run_engine(_job(draft, TRAINED_K), runner)["batches"]
    golden = [output[:MAX_TOKENS] for output in BYTES4.golden["outputs"]]
    assert outputs == [golden, [golden[0]], [golden[7]]]


def test_hidden_states_of_both_layers_are_the_references(
    draft: Path, reference: Reference, runner: str
) -> None:
    result = run_engine(_job(draft, TRAINED_K), runner)
    sequences = _sequences(result)
    # One forward drafts for all requests of a step; blocks keep its order. The last
    # forwards belong to the requests that ran alone, one block each.
    single = [b for b in result["blocks"] if b["request"] >= len(BYTES4.prompts)]
    forwards = max(int(k.split(".")[1]) for k in result["hidden"] if k != "") + 1
    for back, block in enumerate(reversed(single)):
        sequence = sequences[block["request"]]
        if block["context"] >= len(sequence):
            continue
        expected = reference.draft(
            sequence[: block["context"]], block["bonus"], TRAINED_K
        )
        for layer, rows in enumerate(expected.layers):
            found = result["hidden"][f"layer{layer}.{forwards - 1 - back}"]
            assert found.shape[0] >= len(rows)
            error = torch.linalg.vector_norm(found[: len(rows)] - rows)
            assert error / torch.linalg.vector_norm(rows) < RELATIVE
    assert len(single) > 10
