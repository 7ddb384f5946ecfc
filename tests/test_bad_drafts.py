# SPDX-License-Identifier: Apache-2.0
"""Drafts that are damaged, incomplete or something else: each is refused with one
sentence of ours that names the field or file, what was found, and what to do."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from tests.drafts import copy_draft, read_config
from tests.makers import common
from vllm_domino.draft import Draft
from vllm_domino.errors import CheckpointError, DominoError, DraftConfigError
from vllm_domino.makers.layout import FLAT_PATHS

SOURCE = common.DATA / "modelopt"
WEIGHTS = "model.safetensors"
REQUIRED = (
    "hidden_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "block_size",
    "target_layer_ids",
    "mask_token_id",
    "shift_label",
    "pure_draft_prefix_len",
    "emb_dim",
    "gru_hidden_dim",
)
NUMBERS = tuple(
    name for name in REQUIRED if name not in ("target_layer_ids", "shift_label")
)
WHOLE = load_file(SOURCE / WEIGHTS)
TENSORS = sorted(WHOLE)
HUGE = 10**15


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return copy_draft(SOURCE, tmp_path / "draft")


def refusal(folder: Path | str, kind: type[DominoError] = DraftConfigError) -> str:
    with pytest.raises(kind) as caught:
        Draft.open(str(folder)).check()
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith((".", ",", "}")) or "http" in message
    return message


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = read_config(folder)
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def put(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Sets a field where the layout has it."""
    *section, key = FLAT_PATHS[name][0 if name != "block_size" else 1].split(".")

    def change(config: dict[str, Any]) -> None:
        (config[section[0]] if section else config)[key] = value

    return change


def edit_tensors(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]
) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def shown(name: str) -> str:
    return FLAT_PATHS[name][0] if name != "block_size" else name


def test_as_it_is_it_is_sound(draft: Path) -> None:
    Draft.open(str(draft)).check()


# --- Every field ---


@pytest.mark.parametrize("name", REQUIRED)
def test_a_field_that_is_missing(draft: Path, name: str) -> None:
    def drop(config: dict[str, Any]) -> None:
        for section in (config, config["dflash_config"]):
            section.pop(name, None)

    edit(draft, drop)
    message = refusal(draft)
    assert f"config.json has no {shown(name)}" in message


@pytest.mark.parametrize("value", ["8", 8.5, None, [8], {"n": 8}, True])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_another_type(draft: Path, name: str, value: Any) -> None:
    edit(draft, put(name, value))
    message = refusal(draft)
    assert f"{shown(name)} is {value!r} in config.json" in message


@pytest.mark.parametrize("name", NUMBERS)
def test_a_negative_number(draft: Path, name: str) -> None:
    edit(draft, put(name, -1))
    assert f"{shown(name)} is -1 in config.json" in refusal(draft)


@pytest.mark.parametrize("name", NUMBERS)
def test_an_absurdly_large_number(draft: Path, name: str) -> None:
    edit(draft, put(name, HUGE))
    assert f"{shown(name)} is {HUGE}" in refusal(draft)


@pytest.mark.parametrize("value", ["true", 1, None, []])
def test_shift_label_that_is_no_yes_or_no(draft: Path, value: Any) -> None:
    edit(draft, put("shift_label", value))
    assert f"dflash_config.shift_label is {value!r}" in refusal(draft)


@pytest.mark.parametrize("value", [{}, 2, "0,2", ["0", "2"], [0.0, 2.0], []])
def test_target_layer_ids_that_are_no_numbers(draft: Path, value: Any) -> None:
    edit(draft, put("target_layer_ids", value))
    assert "dflash_config.target_layer_ids is" in refusal(draft)


@pytest.mark.parametrize("value", [[2, 0], [0, 0], [-1, 2]])
def test_target_layer_ids_out_of_order(draft: Path, value: list[int]) -> None:
    edit(draft, put("target_layer_ids", value))
    message = refusal(draft)
    assert f"target_layer_ids is {value}; expected layer numbers from 0 up" in message


def test_a_block_of_one(draft: Path) -> None:
    edit(draft, put("block_size", 1))
    assert "block_size is 1 in config.json" in refusal(draft)


@pytest.mark.parametrize("prefix", [6, 7])
def test_a_prefix_as_long_as_the_block(draft: Path, prefix: int) -> None:
    edit(draft, put("pure_draft_prefix_len", prefix))
    message = refusal(draft)
    assert f"pure_draft_prefix_len is {prefix}, but a block drafts 6" in message


def test_without_shift_a_prefix_has_one_token_less(draft: Path) -> None:
    edit(draft, put("shift_label", False))
    edit(draft, put("pure_draft_prefix_len", 5))
    assert "pure_draft_prefix_len is 5, but a block drafts 5" in refusal(draft)


def test_a_mask_token_past_the_vocabulary(draft: Path) -> None:
    edit(draft, put("mask_token_id", 288))
    assert "mask_token_id is 288, outside the vocabulary" in refusal(draft)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rope_theta", None),
        ("rope_theta", "1e6"),
        ("rope_theta", -1.0),
        ("rms_norm_eps", None),
        ("rms_norm_eps", 0),
        ("max_position_embeddings", "2048"),
        ("rope_parameters", 7),
        ("layer_types", "full"),
        ("initializer_range", "small"),
    ],
)
def test_a_field_that_transformers_would_stumble_over(
    draft: Path, name: str, value: Any
) -> None:
    edit(draft, lambda config: config.update({name: value}))
    assert name in refusal(draft)


def test_heads_that_do_not_divide(draft: Path) -> None:
    edit(draft, put("num_key_value_heads", 3))
    assert "num_attention_heads is 2; expected a multiple" in refusal(draft)


# --- Fields that change the meaning ---


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("dflash_config.causal", True),
        ("dflash_config.use_swa", True),
        ("dflash_config.attention_sink_bias", True),
        ("dflash_config.output_multiplier", 2.0),
        ("dflash_config.final_logit_softcapping", 30.0),
        ("dflash_config.input_embedding_scale", 11.3),
        ("is_causal", True),
        ("is_neox_style", False),
        ("hidden_act", "gelu"),
        ("target_hidden_size", 256),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("quantization_config", {"quant_method": "fp8"}),
    ],
)
def test_a_field_that_asks_for_something_else(
    draft: Path, place: str, value: Any
) -> None:
    def change(config: dict[str, Any]) -> None:
        *section, key = place.split(".")
        (config[section[0]] if section else config)[key] = value

    edit(draft, change)
    assert place.split(".")[-1] in refusal(draft)


# --- Other methods' drafts ---


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "an EAGLE-3 draft"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "an EAGLE draft"),
        ({"architectures": ["Qwen3DSparkModel"]}, "a DSpark draft"),
        ({"architectures": ["DFlash2DraftModel"]}, "a DFlash 2 draft"),
        ({"architectures": ["MedusaModel"]}, "a Medusa draft"),
        (
            {"architectures": ["DFlashDraftModel"], "dflash_config": {}},
            "a plain DFlash draft",
        ),
        (
            {
                "architectures": ["DFlashDraftModel"],
                "dflash_config": {"projector_type": "dspark"},
            },
            "a DSpark draft",
        ),
        ({"architectures": ["Qwen3ForCausalLM"]}, "not a Domino draft"),
        ({"architectures": "DFlashDraftModel"}, "not a Domino draft"),
        ({}, "not a Domino draft"),
        (
            {"transformer_layer_config": {}, "speculators_model_type": "eagle3"},
            "an EAGLE-3 draft",
        ),
    ],
)
def test_a_draft_of_another_method(
    draft: Path, config: dict[str, Any], kind: str
) -> None:
    (draft / "config.json").write_text(json.dumps(config))
    assert kind in refusal(draft)


# --- Every tensor ---


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_is_missing(draft: Path, name: str) -> None:
    edit_tensors(draft, lambda tensors: tensors.pop(name))
    assert f"no tensor {name!r}" in refusal(draft, CheckpointError)


@pytest.mark.parametrize(
    "name",
    [name for name, tensor in WHOLE.items() if tensor.shape[::-1] != tensor.shape],
)
def test_a_tensor_that_lies_on_its_side(draft: Path, name: str) -> None:
    def turn(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].T.contiguous()

    edit_tensors(draft, turn)
    message = refusal(draft, CheckpointError)
    assert f"tensor {name!r} has shape" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.uint8])
def test_a_tensor_of_another_kind(draft: Path, dtype: torch.dtype) -> None:
    name = "layers.0.mlp.up_proj.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].to(dtype)

    edit_tensors(draft, change)
    message = refusal(draft, CheckpointError)
    assert f"tensor {name!r} holds {dtype} values; expected float" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["embed_proj.2.weight", "norm.weight"])
def test_a_value_that_is_not_finite(draft: Path, name: str, value: float) -> None:
    edit_tensors(draft, lambda tensors: tensors[name].view(-1)[-1].fill_(value))
    message = refusal(draft, CheckpointError)
    assert f"tensor {name!r} holds values that are not finite" in message


def test_a_tensor_too_many(draft: Path) -> None:
    edit_tensors(draft, lambda tensors: tensors.update({"markov": torch.ones(3)}))
    assert "'markov' is not part of a Domino draft" in refusal(draft, CheckpointError)


def test_weights_of_another_makers_draft(draft: Path) -> None:
    other = common.DATA / "speculators" / WEIGHTS
    (draft / WEIGHTS).write_bytes(other.read_bytes())
    assert "no tensor 'embed_proj.0.weight'" in refusal(draft, CheckpointError)


def test_a_head_that_is_there_twice(tmp_path: Path) -> None:
    draft = copy_draft(common.DATA / "specforge-logit-head", tmp_path / "draft")
    name = "embed_proj.0.weight"
    edit_tensors(draft, lambda t: t.update({name: t[f"logit_head.{name}"].clone()}))
    assert f"tensor {name!r} is there twice" in refusal(draft, CheckpointError)


# --- Files ---


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it is empty"),
        ("{", "Expecting property name"),
        ("[]", "holds a list"),
        ("null", "holds a NoneType"),
        ('{"a": 1, "a": 2}', "key 'a' is there twice"),
        ('{"dflash_config": {"emb_dim": 1, "emb_dim": 2}}', "'emb_dim' is there twice"),
        ('{"rope_theta": NaN}', "NaN is not JSON"),
        ('{"rope_theta": Infinity}', "Infinity is not JSON"),
        ('{"rope_theta": 1e999}', "1e999 is too large"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("[" * 100_000, "nested too deeply"),
        ("\x00\x01", "Expecting value"),
    ],
)
def test_a_config_that_is_no_json(draft: Path, text: str, problem: str) -> None:
    (draft / "config.json").write_text(text)
    message = refusal(draft)
    assert "config.json cannot be read" in message
    assert problem in message


def test_a_config_that_is_no_text(draft: Path) -> None:
    (draft / "config.json").write_bytes(b"\xff\xfe\x80")
    assert "config.json cannot be read" in refusal(draft)


def test_a_config_of_a_gigabyte(draft: Path) -> None:
    with (draft / "config.json").open("wb") as file:
        file.truncate(2**30)
    assert "1,073,741,824 bytes long" in refusal(draft)


def test_no_config(draft: Path) -> None:
    (draft / "config.json").unlink()
    assert "config.json cannot be read" in refusal(draft)


def test_a_config_that_points_to_itself(draft: Path) -> None:
    path = draft / "config.json"
    path.unlink()
    path.symlink_to(path)
    assert "config.json cannot be read" in refusal(draft)


def test_a_folder_that_points_to_itself(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "there is no such folder" in refusal(loop)


@pytest.mark.parametrize("name", ["", "config.json"])
def test_what_is_no_folder(draft: Path, name: str) -> None:
    message = refusal(draft / name if name else "")
    assert ("is a file" if name else "there is no such folder") in message


def test_weights_that_point_to_themselves(draft: Path) -> None:
    path = draft / WEIGHTS
    path.unlink()
    path.symlink_to(path)
    assert f"neither {WEIGHTS}" in refusal(draft, CheckpointError)


def test_a_config_that_is_a_folder(draft: Path) -> None:
    (draft / "config.json").unlink()
    (draft / "config.json").mkdir()
    assert "config.json cannot be read" in refusal(draft)


def test_a_file_of_no_bytes(draft: Path) -> None:
    (draft / WEIGHTS).write_bytes(b"")
    assert "not a whole safetensors file" in refusal(draft, CheckpointError)


@pytest.mark.parametrize("length", [10 * 2**30, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file(draft: Path, length: int) -> None:
    weights = draft / WEIGHTS
    weights.write_bytes(struct.pack("<Q", length) + weights.read_bytes()[8:])
    assert "not a whole safetensors file" in refusal(draft, CheckpointError)


def test_a_file_that_is_cut_off(draft: Path) -> None:
    weights = draft / WEIGHTS
    os.truncate(weights, weights.stat().st_size // 2)
    assert "not a whole safetensors file" in refusal(draft, CheckpointError)


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ("", "not a safetensors index"),
        ("{}", "not a safetensors index"),
        ('{"weight_map": []}', "not a safetensors index"),
        ('{"weight_map": {"a": 1}}', "not a safetensors index"),
        ('{"weight_map": {"a": "b.safetensors"}}', "'b.safetensors', which is not"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "which is not beside it"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "which is not beside it"),
    ],
)
def test_an_index_that_leads_nowhere(draft: Path, index: str, problem: str) -> None:
    (draft / f"{WEIGHTS}.index.json").write_text(index)
    assert problem in refusal(draft, CheckpointError)


def test_a_tensor_in_two_shards(draft: Path) -> None:
    whole = load_file(draft / WEIGHTS)
    for number in (1, 2):
        save_file(whole, draft / f"{number}.safetensors")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (draft / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    assert "is in 1.safetensors and in 2.safetensors too" in refusal(
        draft, CheckpointError
    )


def test_pickled_weights_are_read_only_if_allowed(draft: Path) -> None:
    tensors = load_file(draft / WEIGHTS)
    (draft / WEIGHTS).unlink()
    torch.save(tensors, draft / "pytorch_model.bin")
    message = refusal(draft, CheckpointError)
    assert "pytorch_model.bin), which can run code" in message
    assert '"allow_pickle": true' in message
    Draft.open(str(draft), allow_pickle=True).check()


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, ("touch /tmp/vllm-domino-was-here",))


def test_code_in_a_pickle_does_not_run(draft: Path) -> None:
    (draft / WEIGHTS).unlink()
    torch.save({"norm.weight": Trap()}, draft / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="not a file of plain tensors"):
        Draft.open(str(draft), allow_pickle=True).check()
    assert not Path("/tmp/vllm-domino-was-here").exists()


def test_a_pickled_mask_embedding_needs_leave(draft: Path) -> None:
    torch.save(torch.zeros(128), draft / "mask_embedding.pt")
    assert "mask_embedding.pt is a pickled file" in refusal(draft, CheckpointError)


@pytest.mark.parametrize("name", ["nobody/no-such-draft", "no-such-draft"])
def test_a_hub_id_that_cannot_be_had(name: str) -> None:
    message = refusal(name)
    assert f"{name}: config.json cannot be read" in message
    assert "HF_TOKEN" in message


# --- And what is odd but right ---


@pytest.mark.parametrize("name", ["a draft", "Dräft ß 草稿", "[bold]x", "x'y\"z"])
def test_a_folder_of_any_name(tmp_path: Path, name: str) -> None:
    folder = copy_draft(SOURCE, tmp_path / name)
    Draft.open(str(folder)).check()


def test_head_dim_has_qwen3s_default(draft: Path) -> None:
    edit(draft, lambda config: config.pop("head_dim"))
    assert Draft.open(str(draft)).config.head_dim == Qwen3Config().head_dim


def test_specforge_leaves_out_what_is_false(tmp_path: Path) -> None:
    draft = copy_draft(common.DATA / "specforge", tmp_path / "draft")

    def drop(config: dict[str, Any]) -> None:
        for name in ("shift_label", "pure_draft_prefix_len", "projector_type"):
            del config["dflash_config"][name]

    edit(draft, drop)
    config = Draft.open(str(draft)).config
    assert (config.shift_label, config.pure_draft_prefix_len) == (False, 0)
