# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that Transformers wrote drafts in vLLM as in Transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from tests.engines import PAIRS, Pair, domino_job, run_engine
from vllm_domino.head import rollout
from vllm_domino.modeling_domino import DominoDraftModel

pytestmark = pytest.mark.engine

RELATIVE = 1e-5
MAX_TOKENS = 40
PROMPT = 2


@pytest.fixture(scope="module", params=PAIRS, ids=lambda pair: pair.folder.name)
def pair(request: pytest.FixtureRequest) -> Pair:
    chosen: Pair = request.param
    return chosen


@pytest.fixture(scope="module")
def saved(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "draft"
    DominoDraftModel.from_pretrained(pair.draft).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def in_vllm(pair: Pair, saved: Path) -> dict[str, Any]:
    batches = [[pair.prompts[PROMPT]]]
    job = domino_job(pair.target, saved, batches, MAX_TOKENS, record_hidden=True)
    return run_engine(job, "v1")


@torch.no_grad()
def test_drafts_hidden_states_and_logits_are_the_same(
    pair: Pair, saved: Path, in_vllm: dict[str, Any]
) -> None:
    draft = DominoDraftModel.from_pretrained(saved)
    target = Qwen3ForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    embed = target.get_input_embeddings()
    sequence = pair.prompts[PROMPT] + in_vllm["batches"][0][0]
    compared = 0
    for number, block in enumerate(in_vllm["blocks"]):
        if block["context"] >= len(sequence):
            continue
        context = torch.tensor([sequence[: block["context"]]])
        features = draft.context_features(
            target(context, output_hidden_states=True).hidden_states
        )
        queries = torch.tensor([[block["bonus"]] + [draft.mask_token_id] * 7])
        rows, layers = draft(
            embed(queries),
            features,
            torch.arange(context.shape[1] + 8)[None],
            output_hidden_states=True,
        )
        for index, layer in enumerate(layers):
            found = in_vllm["hidden"][f"layer{index}.{number}"][:8]
            _assert_close(found, layer[0])
        # The logits follow from the last layer's output by the norm and the lm_head.
        last = in_vllm["hidden"][f"layer1.{number}"][:8]
        _assert_close(target.lm_head(draft.norm(last)), target.lm_head(rows)[0])
        drafts = rollout(draft, rows, target.lm_head(rows), queries[:, 0], embed)
        assert block["draft"] == drafts[0].tolist()
        compared += 1
    assert compared >= 8


def test_outputs_are_the_targets_own(pair: Pair, in_vllm: dict[str, Any]) -> None:
    golden = pair.golden["outputs"][PROMPT][:MAX_TOKENS]
    assert in_vllm["batches"] == [[golden]]


def _assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = torch.linalg.vector_norm(found - expected)
    assert error / torch.linalg.vector_norm(expected) < RELATIVE
