# SPDX-License-Identifier: Apache-2.0
"""The backbone's HF config: what Transformers and vLLM take from config.json beside
``DraftConfig``, checked before either of them stumbles over it."""

from collections.abc import Mapping
from typing import Any

from vllm_domino.errors import DraftConfigError
from vllm_domino.makers.layout import MISSING, Maker, look_up

_MODEL_TYPE = "qwen3"  # of every draft there is, whatever its target
# Both would fall back to a default of their own, and the draft would draft badly.
_NEEDED = {
    "rms_norm_eps": "the norms' epsilon",
    "max_position_embeddings": "the positions that the rotary embedding reaches",
}


def require_backbone(raw: Mapping[str, Any], maker: Maker, source: str) -> None:
    """Raises ``DraftConfigError`` unless Transformers can make a Qwen3 config of it."""
    fields = maker.backbone(raw)
    prefix = f"{maker.nested}." if maker.nested else ""
    for place, wanted in {f"{prefix}model_type": _MODEL_TYPE, **maker.marks}.items():
        if (value := look_up(raw, place)) != wanted:
            found = "missing from" if value is MISSING else f"{value!r} in"
            raise DraftConfigError(
                f"{source}: {place} is {found} config.json; expected {wanted!r}. "
                "Export the draft again."
            )
    for name, meaning in _NEEDED.items():
        value = fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise DraftConfigError(
                f"{source}: {prefix}{name} is {value!r} in config.json; expected a "
                f"number above 0, {meaning}."
            )
    if (theta := _rotary_base(fields)) is None:
        raise DraftConfigError(
            f"{source}: config.json has no {prefix}rope_theta, nor one in "
            f"{prefix}rope_parameters. It is needed: the base of the rotary embedding."
        )
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 1:
        raise DraftConfigError(
            f"{source}: {prefix}rope_theta is {theta!r} in config.json; expected a "
            "number above 1, the base of the rotary embedding."
        )
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rotary = fields.get("rope_parameters") or {}
    known = sorted({"default", *ROPE_INIT_FUNCTIONS})
    if (
        not isinstance(rotary, Mapping)
        or rotary.get("rope_type", "default") not in known
    ):
        raise DraftConfigError(
            f"{source}: {prefix}rope_parameters is {rotary!r} in config.json; expected "
            f"an object with a rope_type among {', '.join(known)}."
        )
    # Whose layers they are; a maker may call the whole otherwise.
    given = {k: v for k, v in fields.items() if k not in ("model_type", "auto_map")}
    try:
        Qwen3Config(**given)
    except Exception as error:  # Transformers raises many kinds
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise DraftConfigError(
            f"{source}: Transformers cannot make a Qwen3 config of config.json "
            f"({' '.join(lines) or type(error).__name__}). Mend the field it names, or "
            "export the draft again."
        ) from None


def _rotary_base(fields: Mapping[str, Any]) -> Any:
    rotary = fields.get("rope_parameters")
    if isinstance(rotary, Mapping) and rotary.get("rope_theta") is not None:
        return rotary["rope_theta"]
    return fields.get("rope_theta")
