# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that each maker's own package wrote (tests/makers/README.md), in vLLM and
under Transformers: drafts are those of that maker's own modules."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from vllm.engine.arg_utils import EngineArgs

from tests.drafts import copy_draft
from tests.engines import BYTES4, domino_job, run_engine
from tests.makers import common
from vllm_domino.head import rollout
from vllm_domino.makers import read
from vllm_domino.modeling_domino import DominoDraftModel
from vllm_domino.seams import drafts_with_domino

FOLDERS = {
    "specforge": "specforge",
    "specforge-logit-head": "specforge",
    "automodel": "automodel",
    "modelopt": "modelopt",
    "speculators": "speculators",
}
# Under Transformers a draft must know the whole vocabulary.
WHOLE_VOCABULARY = [folder for folder in FOLDERS if folder != "speculators"]
folders = pytest.mark.parametrize("folder", FOLDERS)
runners = pytest.mark.parametrize(
    "runner", ["v1", pytest.param("v2", marks=pytest.mark.slow)]
)


def expected_blocks(folder: str) -> dict[tuple[int, int], list[int]]:
    """The maker's drafts by (request, context length)."""
    loaded = json.loads((common.DATA / folder / common.EXPECTED).read_text())
    return {(b["request"], b["context"]): b["draft"] for b in loaded["blocks"]}


def config_of(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return loaded


@folders
def test_the_maker_is_recognised(folder: str) -> None:
    _, maker = read(config_of(common.DATA / folder), folder)
    assert maker.name == FOLDERS[folder]


@pytest.mark.engine
@pytest.mark.support(param="folder", prefix="drafts of a checkpoint by ")
@runners
@folders
def test_drafts_in_vllm_are_the_makers(folder: str, runner: str) -> None:
    job = domino_job(
        BYTES4.target,
        common.DATA / folder,
        [[BYTES4.prompts[request] for request in common.REQUESTS]],
        common.ANSWER_TOKENS,
    )
    result = run_engine(job, runner)
    for output, request in zip(result["batches"][0], common.REQUESTS, strict=True):
        assert output == BYTES4.golden["outputs"][request][: common.ANSWER_TOKENS]
    expected = expected_blocks(folder)
    compared = 0
    for block in result["blocks"]:
        key = (common.REQUESTS[block["request"]], block["context"])
        if key in expected:
            drafts = expected[key]
            assert block["draft"][: len(drafts)] == drafts
            compared += 1
    assert compared >= 30


@pytest.mark.parametrize("folder", WHOLE_VOCABULARY)
def test_drafts_under_transformers_are_the_makers(folder: str) -> None:
    target = common.load_target()
    draft = DominoDraftModel.from_pretrained(
        common.DATA / folder, dtype=torch.float32
    ).eval()
    expected = expected_blocks(folder)
    for request, context, bonus in common.contexts():
        block = common.block_of(bonus)
        with torch.no_grad():
            rows, _ = draft(
                inputs_embeds=target.model.embed_tokens(block),
                target_hidden=common.target_features(target, context),
                position_ids=torch.arange(len(context) + block.shape[1])[None],
            )
            predicting = rows if draft.shift_label else rows[:, 1:]
            base = target.lm_head(predicting)
            first = torch.tensor([bonus])
            drafts = rollout(draft, predicting, base, first, target.model.embed_tokens)
        wanted = expected[request, len(context)]
        assert drafts[0].tolist()[: len(wanted)] == wanted


def test_a_speculators_draft_alone_brings_its_target() -> None:
    """``vllm serve <draft>``, as vLLM does it for other speculators."""
    draft = common.DATA / "speculators"
    verifier = config_of(draft)["speculators_config"]["verifier"]["name_or_path"]
    arguments = EngineArgs(
        model=str(draft), skip_tokenizer_init=True, dtype="float32", max_model_len=256
    )
    config = arguments.create_engine_config()
    assert config.model_config.model == verifier
    assert config.speculative_config.draft_model_config.model == str(draft)
    assert drafts_with_domino(config)
    # What its proposal says, one fewer than it was trained to draft.
    assert config.speculative_config.num_speculative_tokens == common.BLOCK_SIZE - 1


@pytest.mark.engine
@pytest.mark.support("mask embedding of the draft's own")
@runners
def test_a_mask_embedding_stands_in_for_the_masks(runner: str, tmp_path: Path) -> None:
    """Another token's embedding for the mask drafts as that token for the mask does."""
    letter = 65
    table = load_file(BYTES4.target / "model.safetensors")["model.embed_tokens.weight"]
    shipped = copy_draft(
        BYTES4.draft,
        tmp_path / "shipped",
        edit_tensors=lambda t: t.update(mask_embedding=table[letter].clone()),
    )
    meant = copy_draft(
        BYTES4.draft,
        tmp_path / "meant",
        lambda config: config["dflash_config"].update(mask_token_id=letter),
    )
    first, second = (
        run_engine(domino_job(BYTES4.target, draft, [BYTES4.prompts], 24), runner)
        for draft in (shipped, meant)
    )
    assert [b["draft"] for b in first["blocks"]] == [
        b["draft"] for b in second["blocks"]
    ]
    golden = {(s["prompt"], s["context"]): s["draft"] for s in BYTES4.golden["steps"]}
    assert any(
        golden.get((b["request"], b["context"]), b["draft"]) != b["draft"]
        for b in first["blocks"]
    )
