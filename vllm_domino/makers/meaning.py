# SPDX-License-Identifier: Apache-2.0
"""Fields that change what a draft computes, and that this version does not compute.

Left unread they would cost acceptance and say nothing, so each must be absent or say
what is computed anyway.
"""

from collections.abc import Mapping
from typing import Any

from vllm_domino.errors import DraftConfigError
from vllm_domino.makers.layout import FLAT_PATHS, MISSING, SECTION, look_up

_NESTED = "transformer_layer_config"
# Place -> (values that change nothing, what another one means).
_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "is_causal": ((False,), "a block that attends causally"),
    f"{SECTION}.causal": ((False,), "a block that attends causally"),
    f"{SECTION}.use_swa": ((False,), "a sliding window"),
    f"{SECTION}.attention_sink_bias": ((False,), "attention sinks"),
    "attention_sink_bias": ((False,), "attention sinks"),
    "add_swa_attention_sink_bias": ((False,), "attention sinks"),
    f"{SECTION}.attention_value_scale": ((1, 1.0), "scaled attention values"),
    f"{SECTION}.output_multiplier": ((1, 1.0), "scaled logits"),
    "logit_scale": ((1, 1.0), "scaled logits"),
    f"{SECTION}.final_logit_softcapping": ((), "capped logits"),
    f"{SECTION}.input_embedding_scale": ((1, 1.0), "scaled embeddings"),
    f"{SECTION}.use_aux_hidden_state": ((True,), "a draft without target layers"),
    "is_neox_style": ((True,), "interleaved rotary embedding"),
    "hidden_act": (("silu",), "another activation"),
    f"{_NESTED}.hidden_act": (("silu",), "another activation"),
}
_LAYER_TYPES = ("layer_types", f"{_NESTED}.layer_types")


def require_known_meaning(raw: Mapping[str, Any], source: str) -> None:
    """Raises ``DraftConfigError`` for a draft that computes something else."""
    for place, (neutral, meaning) in _NEUTRAL.items():
        value = look_up(raw, place)
        if value is not MISSING and value is not None and value not in neutral:
            raise _unsupported(source, place, value, meaning)
    for place in _LAYER_TYPES:
        types = look_up(raw, place)
        if isinstance(types, list) and any(kind != "full_attention" for kind in types):
            raise _unsupported(source, place, types, "layers without full attention")
    if raw.get("quantization_config"):
        raise DraftConfigError(
            f"{source}: quantization_config is set, but a quantised Domino draft "
            "cannot be read. Use the unquantised draft; the target may be quantised "
            "as you like."
        )
    for prefix in ("", f"{_NESTED}."):
        width = look_up(raw, "target_hidden_size")
        own = look_up(raw, f"{prefix}hidden_size")
        if MISSING not in (width, own) and width not in (None, own):
            raise DraftConfigError(
                f"{source}: target_hidden_size is {width!r} and {prefix}hidden_size "
                f"{own!r}, but a Domino draft shares its target's embedding. Use a "
                "draft as wide as its target."
            )


def unknown_fields(raw: Mapping[str, Any]) -> list[str]:
    """What a draft's own section says and nothing here reads: perhaps notes of its
    training, perhaps something that a newer version would compute."""
    section = raw.get(SECTION)
    if not isinstance(section, Mapping):
        return []
    read = {place for places in FLAT_PATHS.values() for place in places}
    read |= {*_NEUTRAL, f"{SECTION}.projector_type"}
    places = [f"{SECTION}.{key}" for key in section]
    return [place for place in places if place not in read]


def _unsupported(source: str, place: str, value: Any, meaning: str) -> DraftConfigError:
    return DraftConfigError(
        f"{source}: {place} is {value!r}, which means {meaning}. This version of "
        "vllm-domino does not compute that; a newer one may, or train the draft "
        "without it."
    )
