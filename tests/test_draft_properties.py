# SPDX-License-Identifier: Apache-2.0
"""Any valid draft goes through every layout unchanged; any damage to one either changes
nothing or is refused by an error of ours."""

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from tests.configured import configure, domino
from tests.drafts import read_config
from tests.engines import BYTES4
from tests.makers import common
from vllm_domino.config import DraftConfig
from vllm_domino.draft import Draft
from vllm_domino.errors import DominoError
from vllm_domino.makers import BY_NAME, is_domino, read
from vllm_domino.makers.layout import Maker

SOURCES = ("modelopt", "specforge", "specforge-logit-head", "automodel", "speculators")
WEIGHTS = "model.safetensors"
WRITERS = [maker for maker in BY_NAME.values() if maker.write is not None]
MANY = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@st.composite
def draft_configs(draw: st.DrawFn) -> DraftConfig:
    """Every config that a draft may have."""
    shift = draw(st.booleans())
    block = draw(st.integers(2, 64))
    vocab = draw(st.integers(2, 300_000))
    layers = draw(st.sets(st.integers(0, 200), min_size=1, max_size=8))
    heads = draw(st.integers(1, 64))
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    size = st.integers(1, 20_000)
    return DraftConfig(
        hidden_size=draw(size),
        vocab_size=vocab,
        num_hidden_layers=draw(st.integers(1, 100)),
        num_attention_heads=heads,
        num_key_value_heads=draw(st.sampled_from(divisors)),
        head_dim=draw(st.integers(1, 512)),
        intermediate_size=draw(size),
        attention_bias=draw(st.booleans()),
        block_size=block,
        target_layer_ids=tuple(sorted(layers)),
        mask_token_id=draw(st.integers(0, vocab - 1)),
        draft_vocab_size=draw(st.none() | st.integers(1, vocab)),
        shift_label=shift,
        pure_draft_prefix_len=draw(st.integers(0, block - (1 if shift else 2))),
        emb_dim=draw(size),
        gru_hidden_dim=draw(size),
    )


BACKBONE = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "hidden_act": "silu",
}


def written(maker: Maker, config: DraftConfig) -> dict[str, Any]:
    assert maker.write is not None
    raw = maker.write(config, BACKBONE, "some/target")
    loaded: dict[str, Any] = json.loads(json.dumps(raw))
    return loaded


@MANY
@given(draft_configs(), st.sampled_from(WRITERS), st.sampled_from(WRITERS))
def test_a_config_goes_through_any_two_layouts(
    config: DraftConfig, first: Maker, second: Maker
) -> None:
    raw = written(first, config)
    assert is_domino(raw)
    found, maker = read(raw, "x")
    assert maker is first
    # speculators' layout always says how many tokens a draft has.
    size = found.draft_vocab_size
    assert size in (config.draft_vocab_size, config.vocab_size)
    assert (
        found.model_copy(update={"draft_vocab_size": config.draft_vocab_size}) == config
    )
    assert second.write is not None
    again, maker = read(second.write(found, first.backbone(raw), "some/target"), "x")
    assert maker is second
    assert again.drafted_vocab == config.drafted_vocab
    assert (
        again.model_copy(update={"draft_vocab_size": config.draft_vocab_size}) == config
    )


# --- Damage ---


@contextmanager
def copy_of(source: str) -> Iterator[Path]:
    # Not tmp_path: one test makes hundreds.
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "draft"
        shutil.copytree(common.DATA / source, folder)
        for shard in folder.glob("model-*.safetensors"):
            shard.rename(folder / WEIGHTS)
        (folder / f"{WEIGHTS}.index.json").unlink(missing_ok=True)
        yield folder


Contents = tuple[dict[str, Any], dict[str, torch.Tensor]]
# Of the backbone's HF config, what its layers compute by.
_COMPUTED_BY = (
    "attention_bias",
    "hidden_act",
    "layer_types",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
)


def contents(folder: Path) -> Contents:
    """All that decides what a draft drafts."""
    draft = Draft.open(str(folder))
    draft.check()
    backbone = Qwen3Config(**draft.maker.backbone(draft.raw))
    settings = {name: getattr(backbone, name) for name in _COMPUTED_BY}
    # Only compared with the target's; it decides nothing.
    config = draft.config.model_dump(exclude={"num_target_layers"})
    # t2d only says again what d2t says.
    tensors = {name: t for name, t in draft.tensors() if name != "t2d"}
    return config | settings, tensors


def same(one: Contents, other: Contents) -> bool:
    return (
        one[0] == other[0]
        and one[1].keys() == other[1].keys()
        and all(torch.equal(one[1][name], other[1][name]) for name in one[1])
    )


def survives(source: str, damage: Callable[[Path], None]) -> None:
    """Damaged, it is refused as ours refuse; or it is what it was."""
    with copy_of(source) as folder:
        before = contents(folder)
        damage(folder)
        after: Contents | None
        try:
            after = contents(folder)
        except DominoError as error:
            after, message = None, str(error)
        if after is None:
            assert "\n" not in message
            return
        assert same(before, after)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))


JUNK = st.one_of(
    st.none(),
    st.text(max_size=5),
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.just(-(10**20)),
)
# Another number there is another draft, and nothing tells that it is not this one.
_ANY_NUMBER = ("rope_theta", "rms_norm_eps", "max_position_embeddings")


@MANY
@given(st.sampled_from(SOURCES), st.data())
def test_a_field_that_is_gone(source: str, data: st.DataObject) -> None:
    raw = read_config(common.DATA / source)
    path = data.draw(st.sampled_from(sorted(places(raw))))

    def damage(folder: Path) -> None:
        config = read_config(folder)
        parent = config
        for key in path[:-1]:
            parent = parent[key]
        del parent[path[-1]]
        (folder / "config.json").write_text(json.dumps(config))

    # A field with a meaning when it is left out is another draft, not a damaged one.
    assume(path[-1] not in ("shift_label", "pure_draft_prefix_len"))
    survives(source, damage)


@MANY
@given(st.sampled_from(SOURCES), st.data())
def test_a_field_that_holds_something_of_another_kind(
    source: str, data: st.DataObject
) -> None:
    raw = read_config(common.DATA / source)
    path = data.draw(st.sampled_from(sorted(places(raw))))
    junk = data.draw(JUNK)
    assume(path[-1] not in _ANY_NUMBER or not isinstance(junk, float))

    def damage(folder: Path) -> None:
        config = read_config(folder)
        parent = config
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = junk
        (folder / "config.json").write_text(json.dumps(config))

    survives(source, damage)


@MANY
@given(
    st.sampled_from(SOURCES), st.sampled_from(["config.json", WEIGHTS]), st.floats(0, 1)
)
def test_a_file_that_is_cut_off(source: str, name: str, where: float) -> None:
    def damage(folder: Path) -> None:
        size = (folder / name).stat().st_size
        os.truncate(folder / name, min(int(size * where), size - 1))

    survives(source, damage)


@MANY
@given(st.sampled_from(SOURCES), st.floats(0, 1), st.integers(1, 255))
def test_a_byte_of_the_header_that_flips(source: str, where: float, mask: int) -> None:
    def damage(folder: Path) -> None:
        data = bytearray((folder / WEIGHTS).read_bytes())
        (length,) = struct.unpack("<Q", data[:8])
        data[int(where * (7 + length))] ^= mask
        (folder / WEIGHTS).write_bytes(data)

    survives(source, damage)


@MANY
@given(st.sampled_from(SOURCES), st.data())
def test_a_tensor_that_is_damaged(source: str, data: st.DataObject) -> None:
    kind = data.draw(
        st.sampled_from(["gone", "renamed", "flat", "longer", "int", "nan", "empty"])
    )

    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        name = data.draw(st.sampled_from(sorted(tensors)))
        tensor = tensors.pop(name)
        if kind == "renamed":
            tensors[f"{name}x"] = tensor
        elif kind == "flat":
            assume(tensor.dim() > 1)
            tensors[name] = tensor.flatten()
        elif kind == "longer":
            tensors[name] = torch.cat([tensor, tensor[:1]])
        elif kind == "int":
            assume(tensor.is_floating_point())
            tensors[name] = tensor.int()
        elif kind == "nan":
            assume(tensor.is_floating_point())
            tensors[name] = tensor.float().fill_(float("nan"))
        elif kind == "empty":
            tensors[name] = tensor[:0]
        save_file(tensors, folder / WEIGHTS)

    survives(source, damage)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(SOURCES), st.data())
def test_vllm_never_sees_the_damage(source: str, data: st.DataObject) -> None:
    """Through vLLM's own configuration: it goes through, or stops at our door."""
    raw = read_config(common.DATA / source)
    path = data.draw(st.sampled_from(sorted(places(raw))))
    junk = data.draw(JUNK | st.just("gone"))
    with copy_of(source) as folder:
        config = read_config(folder)
        parent = config
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = junk
        if junk == "gone":
            del parent[path[-1]]
        (folder / "config.json").write_text(json.dumps(config))
        # Whatever else it raises, the test shows.
        with suppress(DominoError):
            configure(BYTES4.target, domino(folder))


def test_a_width_that_is_a_line_break() -> None:
    """Found by the test above: the message had it as it was, over two lines."""

    def damage(folder: Path) -> None:
        config = read_config(folder) | {"target_hidden_size": "\n"}
        (folder / "config.json").write_text(json.dumps(config))

    survives("speculators", damage)
