# SPDX-License-Identifier: Apache-2.0
"""What a user can get wrong stops before an engine starts, with one message that names
the field or file, what was found, and what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs

from tests.configured import configure, domino
from tests.drafts import (
    Edit,
    TensorEdit,
    copy_draft,
    plain_dflash_draft,
    read_config,
)
from tests.engines import BYTES4
from tests.targets import gpt2
from vllm_domino import door
from vllm_domino.checkpoint import target_token_ids
from vllm_domino.errors import CheckpointError, DominoError, DraftConfigError
from vllm_domino.makers import read


@pytest.fixture
def broken(tmp_path: Path) -> Callable[..., Path]:
    def make(edit: Edit | None = None, tensors: TensorEdit | None = None) -> Path:
        return copy_draft(BYTES4.draft, tmp_path / "draft", edit, tensors)

    return make


def in_head(**changes: Any) -> Edit:
    return lambda config: config["dflash_config"].update(changes)


def refusal(kind: type[DominoError], target: Path, settings: dict[str, Any]) -> str:
    with pytest.raises(kind) as caught:
        configure(target, settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- The draft's weights ---


def test_a_missing_head_tensor_is_named(broken: Callable[..., Path]) -> None:
    draft = broken(tensors=lambda t: t.pop("embed_proj.0.weight"))
    message = refusal(CheckpointError, BYTES4.target, domino(draft))
    assert "no tensor 'embed_proj.0.weight'" in message
    assert str(draft) in message


def test_a_missing_backbone_tensor_is_named(broken: Callable[..., Path]) -> None:
    draft = broken(tensors=lambda t: t.pop("layers.1.self_attn.k_norm.weight"))
    message = refusal(CheckpointError, BYTES4.target, domino(draft))
    assert "no tensor 'layers.1.self_attn.k_norm.weight'" in message


def test_an_extra_tensor_is_named(broken: Callable[..., Path]) -> None:
    draft = broken(tensors=lambda t: t.update({"embed_proj.3.weight": torch.ones(2)}))
    message = refusal(CheckpointError, BYTES4.target, domino(draft))
    assert "'embed_proj.3.weight' is not part of a Domino draft" in message


def test_a_wrong_gru_width_is_named(broken: Callable[..., Path]) -> None:
    draft = broken(in_head(gru_hidden_dim=48))
    message = refusal(CheckpointError, BYTES4.target, domino(draft))
    assert "'embed_proj.0.weight' has shape [32, 192]" in message
    assert "calls for [32, 176]" in message


def test_a_truncated_safetensors_file_is_named(broken: Callable[..., Path]) -> None:
    weights = broken() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    message = refusal(CheckpointError, BYTES4.target, domino(weights.parent))
    assert f"{weights}: not a whole safetensors file" in message
    assert "fetch or export the draft again" in message


def test_weights_that_are_not_safetensors_are_refused(
    broken: Callable[..., Path],
) -> None:
    weights = broken() / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    message = refusal(CheckpointError, BYTES4.target, domino(weights.parent))
    assert "neither model.safetensors nor model.safetensors.index.json" in message


# --- The draft's config ---


def test_a_mask_id_outside_the_vocabulary(broken: Callable[..., Path]) -> None:
    draft = broken(in_head(mask_token_id=288))
    message = refusal(DraftConfigError, BYTES4.target, domino(draft))
    assert "dflash_config.mask_token_id is 288, outside the vocabulary" in message
    assert "0 to 287" in message


def test_an_unknown_projector_type(broken: Callable[..., Path]) -> None:
    draft = broken(in_head(projector_type="waltz"))
    message = refusal(DraftConfigError, BYTES4.target, domino(draft))
    assert "dflash_config.projector_type is 'waltz'; expected 'domino'" in message


def test_a_field_that_is_not_there_is_named(broken: Callable[..., Path]) -> None:
    draft = broken(lambda config: config["dflash_config"].pop("emb_dim"))
    message = refusal(DraftConfigError, BYTES4.target, domino(draft))
    assert "config.json has no dflash_config.emb_dim" in message


def test_a_field_of_the_wrong_type_is_named(broken: Callable[..., Path]) -> None:
    draft = broken(in_head(emb_dim="32"))
    message = refusal(DraftConfigError, BYTES4.target, domino(draft))
    assert "dflash_config.emb_dim is '32'" in message


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the door warns of; vLLM's own logging keeps it from pytest's."""
    lines: list[str] = []
    monkeypatch.setattr(
        door.logger, "warning", lambda text, *args: lines.append(text % args)
    )
    return lines


def test_a_field_that_nobody_knows_is_told(
    broken: Callable[..., Path], said: list[str]
) -> None:
    configure(BYTES4.target, domino(broken(in_head(num_anchors=512))))
    assert "dflash_config.num_anchors in config.json" in said[0]


def test_nothing_is_said_of_a_draft_that_is_known(said: list[str]) -> None:
    configure(BYTES4.target, domino(BYTES4.draft))
    assert said == []


def test_method_domino_with_a_plain_dflash_draft(tmp_path: Path) -> None:
    draft = plain_dflash_draft(BYTES4.draft, tmp_path / "draft")
    message = refusal(DraftConfigError, BYTES4.target, domino(draft))
    assert 'Set "method": "dflash"' in message


def test_method_domino_with_something_else() -> None:
    message = refusal(DraftConfigError, BYTES4.target, domino(BYTES4.target))
    assert "not a Domino draft" in message


# --- The target ---


def with_target(tmp_path: Path, **changes: Any) -> Path:
    """bytes4's target with another config; the door looks no further."""
    return copy_draft(BYTES4.target, tmp_path / "target", lambda c: c.update(changes))


def test_a_target_with_another_vocabulary(tmp_path: Path) -> None:
    target = with_target(tmp_path, vocab_size=320)
    message = refusal(DraftConfigError, target, domino(BYTES4.draft))
    assert "vocab_size is 288" in message
    assert "has 320" in message
    assert str(target) in message


def test_a_target_of_another_width(tmp_path: Path) -> None:
    target = with_target(tmp_path, hidden_size=192)
    message = refusal(DraftConfigError, target, domino(BYTES4.draft))
    assert "hidden_size is 128" in message
    assert "has 192" in message


def test_target_layer_ids_beyond_the_target(broken: Callable[..., Path]) -> None:
    draft = broken(in_head(target_layer_ids=[0, 4]))
    message = refusal(DraftConfigError, BYTES4.target, domino(draft))
    assert "target_layer_ids asks for layer 4" in message
    assert "4 layers (0 to 3)" in message


def test_a_draft_of_a_deeper_target(broken: Callable[..., Path]) -> None:
    draft = broken(lambda config: config.update(num_target_layers=36))
    message = refusal(DraftConfigError, BYTES4.target, domino(draft))
    assert "target of 36 layers" in message


# --- The user's JSON ---


@pytest.mark.parametrize("wanted", [0, -1, "8", True, 2.0])
def test_num_speculative_tokens_that_is_no_count(wanted: Any) -> None:
    settings = domino(BYTES4.draft, num_speculative_tokens=wanted)
    message = refusal(DraftConfigError, BYTES4.target, settings)
    assert f"num_speculative_tokens is {wanted!r}; expected 1 to 8" in message


def test_num_speculative_tokens_beyond_the_block() -> None:
    settings = domino(BYTES4.draft, num_speculative_tokens=9)
    message = refusal(DraftConfigError, BYTES4.target, settings)
    assert "num_speculative_tokens is 9" in message
    assert "was trained to draft 8" in message


def test_no_such_path() -> None:
    message = refusal(DraftConfigError, BYTES4.target, domino("/no/such/draft"))
    assert "'/no/such/draft': there is no such folder" in message


def test_a_hub_id_that_cannot_be_had() -> None:
    message = refusal(DraftConfigError, BYTES4.target, domino("nobody/no-such-draft"))
    assert "nobody/no-such-draft: config.json cannot be read" in message


def test_no_model() -> None:
    message = refusal(DraftConfigError, BYTES4.target, {"method": "domino"})
    assert 'no "model"' in message


def test_a_domino_draft_under_another_method() -> None:
    settings = {"method": "eagle", "model": str(BYTES4.draft)}
    message = refusal(DraftConfigError, BYTES4.target, settings)
    assert "method is 'eagle'" in message
    assert 'Set "method": "domino"' in message


def test_an_unknown_draft_block() -> None:
    settings = domino(BYTES4.draft, draft_block="long")
    message = refusal(DraftConfigError, BYTES4.target, settings)
    assert "speculative_config.draft_block is 'long'" in message
    assert '"trained"' in message


def test_an_unknown_head() -> None:
    settings = domino(BYTES4.draft, head="quick")
    message = refusal(DraftConfigError, BYTES4.target, settings)
    assert "speculative_config.head is 'quick'" in message


@pytest.mark.parametrize("size", [0, -1, "2048", True])
def test_a_pool_of_no_size(size: Any) -> None:
    settings = domino(BYTES4.draft, head="pool", pool_size=size)
    message = refusal(DraftConfigError, BYTES4.target, settings)
    assert f"speculative_config.pool_size is {size!r}" in message


def test_projected_embeddings_need_the_whole_table() -> None:
    settings = domino(BYTES4.draft, project_embeddings=True)
    with pytest.raises(DraftConfigError, match="no rank has the whole embedding"):
        configure(BYTES4.target, settings, tensor_parallel_size=2)


def test_local_argmax_is_not_for_a_head() -> None:
    settings = domino(BYTES4.draft, use_local_argmax_reduction=True)
    message = refusal(DraftConfigError, BYTES4.target, settings)
    assert "use_local_argmax_reduction is set" in message


def test_adaptive_verification_with_rows_that_are_not_drafted() -> None:
    settings = domino(
        BYTES4.draft,
        num_speculative_tokens=3,
        draft_block="trained",
        enable_adaptive_verification=True,
    )
    message = refusal(DraftConfigError, BYTES4.target, settings)
    assert 'set draft_block to "short"' in message


def test_a_target_that_hands_out_no_hidden_states(tmp_path: Path) -> None:
    message = refusal(DraftConfigError, gpt2(tmp_path / "gpt2"), domino(BYTES4.draft))
    assert "is a GPT2LMHeadModel" in message
    assert "hidden states" in message


def test_pipeline_parallelism() -> None:
    settings = domino(BYTES4.draft)
    with pytest.raises(DraftConfigError, match="pipeline_parallel_size is 2"):
        configure(BYTES4.target, settings, pipeline_parallel_size=2)


def test_a_reduced_vocabulary_larger_than_the_targets(
    broken: Callable[..., Path],
) -> None:
    draft = broken(lambda config: config.update(draft_vocab_size=999))
    message = refusal(DraftConfigError, BYTES4.target, domino(draft))
    assert "draft_vocab_size is 999" in message


def test_a_reduced_vocabulary_without_its_tensors(broken: Callable[..., Path]) -> None:
    draft = broken(lambda config: config.update(draft_vocab_size=96))
    message = refusal(CheckpointError, BYTES4.target, domino(draft))
    assert "no tensor 'd2t', 'lm_head.weight'" in message


@pytest.mark.parametrize(
    "d2t",
    [torch.tensor([0, 400, 0]), torch.tensor([1, 0, 0]), torch.tensor([-1, 0, 0])],
)
def test_a_map_that_leads_nowhere(d2t: torch.Tensor) -> None:
    config = read(read_config(BYTES4.draft), "x")[0]
    with pytest.raises(CheckpointError, match="'d2t' does not map the draft's 3"):
        target_token_ids(config, d2t, "x")


# --- And what is right goes through ---


@pytest.mark.parametrize("method", ["domino", "dflash", None])
@pytest.mark.parametrize("released", [True, False])
def test_each_way_to_ask_for_domino(
    method: str | None, released: bool, broken: Callable[..., Path]
) -> None:
    name = "DFlashDraftModel" if released else "DominoDraftModel"
    draft = broken(lambda config: config.update(architectures=[name]))
    settings = {"model": str(draft)} | ({"method": method} if method else {})
    config = configure(BYTES4.target, settings)
    assert config.method == "dflash"
    assert config.num_speculative_tokens == 8
    assert config.draft_model_config.architectures == ["DFlashDominoDraftModel"]


def test_without_shift_a_block_drafts_one_token_less(
    broken: Callable[..., Path],
) -> None:
    draft = broken(in_head(shift_label=False))
    assert configure(BYTES4.target, domino(draft)).num_speculative_tokens == 7
    with pytest.raises(DraftConfigError, match="was trained to draft 7"):
        configure(BYTES4.target, domino(draft, num_speculative_tokens=8))


def test_the_spec_flags_are_the_json(broken: Callable[..., Path]) -> None:
    arguments = EngineArgs(
        model=str(BYTES4.target),
        skip_tokenizer_init=True,
        max_model_len=512,
        spec_method="dflash",
        spec_model=str(BYTES4.draft),
        spec_tokens=5,
    )
    config = arguments.create_engine_config().speculative_config
    assert config.num_speculative_tokens == 5
    assert config.draft_model_config.architectures == ["DFlashDominoDraftModel"]
