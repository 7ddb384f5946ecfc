# SPDX-License-Identifier: Apache-2.0
"""Who makes Domino drafts, and how to read each: config.json -> ``DraftConfig``.

One file a maker, one registry here. To add one, write its ``Maker`` and list it.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from vllm_domino.config import DraftConfig
from vllm_domino.errors import DraftConfigError
from vllm_domino.makers.automodel import AUTOMODEL
from vllm_domino.makers.layout import (
    DOMINO_PROJECTOR,
    MISSING,
    Maker,
    architectures,
    look_up,
)
from vllm_domino.makers.meaning import require_known_meaning
from vllm_domino.makers.modelopt import MODELOPT
from vllm_domino.makers.released import RELEASED
from vllm_domino.makers.specforge import SPECFORGE
from vllm_domino.makers.speculators import SPECULATORS

# The first that claims a config.json reads it: from the most particular layout to the
# one that plain DFlash shares.
MAKERS = (SPECULATORS, AUTOMODEL, SPECFORGE, MODELOPT, RELEASED)
BY_NAME = {maker.name: maker for maker in MAKERS}

# What else a draft may turn out to be, by what its config says, and its vLLM method.
_KIN = {
    "eagle3": ("an EAGLE-3 draft", "eagle3"),
    "eagle": ("an EAGLE draft", "eagle"),
    "dspark": ("a DSpark draft", "dspark"),
    "dflash2": ("a DFlash 2 draft", "dflash"),
    "dflash": ("a plain DFlash draft", "dflash"),
    "medusa": ("a Medusa draft", "medusa"),
    "mlpspeculator": ("an MLP speculator", "mlp_speculator"),
}


def maker_of(raw: Mapping[str, Any]) -> Maker | None:
    """Who laid this config.json out; None if nobody known."""
    return next((maker for maker in MAKERS if maker.claims(raw)), None)


def is_domino(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json says that it is a Domino draft's."""
    maker = maker_of(raw)
    return maker is not None and _projector(maker, raw) == DOMINO_PROJECTOR


def read(raw: Mapping[str, Any], source: str) -> tuple[DraftConfig, Maker]:
    """Reads a config.json.

    Args:
        raw: The parsed file, or an HF config's ``to_dict()``.
        source: What to call the draft in an error: its path or hub id.

    Raises:
        DraftConfigError: It is not a Domino draft, or not a usable one.
    """
    maker = maker_of(raw)
    if maker is None:
        raise DraftConfigError(f"{source}: {_not_ours(raw)}")
    _require_domino(maker, raw, source)
    require_known_meaning(raw, source)
    fields = dict(maker.defaults)
    for name, places in maker.paths.items():
        for place in places:
            if (value := look_up(raw, place)) is not MISSING:
                fields[name] = value
                break
    if maker.adjust is not None:
        maker.adjust(fields)
    try:
        return DraftConfig.model_validate(fields), maker
    except ValidationError as error:
        raise DraftConfigError(f"{source}: {_explain(error, maker, raw)}") from None


def _projector(maker: Maker, raw: Mapping[str, Any]) -> Any:
    projector = look_up(raw, maker.projector)
    return maker.implied_projector if projector in (MISSING, None) else projector


def _require_domino(maker: Maker, raw: Mapping[str, Any], source: str) -> None:
    projector = _projector(maker, raw)
    if projector == DOMINO_PROJECTOR:
        return
    if projector in (None, "dflash"):
        raise DraftConfigError(f"{source}: {_not_ours(raw)}")
    kin = _KIN.get(projector) if isinstance(projector, str) else None
    if kin is not None:
        raise DraftConfigError(
            f"{source}: {maker.projector} is {projector!r}, so this is {kin[0]}, not "
            f'a Domino one. Set "method": "{kin[1]}" to use it as such.'
        )
    raise DraftConfigError(
        f"{source}: {maker.projector} is {projector!r}; expected "
        f"{DOMINO_PROJECTOR!r}, the only head that this version knows. A newer "
        "vllm-domino may know it."
    )


def _not_ours(raw: Mapping[str, Any]) -> str:
    """One sentence on what a config.json is instead."""
    named = architectures(raw)
    said = " ".join([*named, str(raw.get("speculators_model_type", ""))]).lower()
    for mark, (kind, method) in _KIN.items():
        if mark in said:
            return (
                f"this is {kind} (architectures {named}), not a Domino one: it has no "
                f'projector_type "{DOMINO_PROJECTOR}". Set "method": "{method}" to use '
                "it as such."
            )
    known = ", ".join(maker.title for maker in MAKERS)
    return (
        f"architectures is {named}, which is not a Domino draft's (read are: {known}). "
        "Point speculative_config.model at a Domino draft, or name the method that "
        "this checkpoint is for."
    )


def _explain(error: ValidationError, maker: Maker, raw: Mapping[str, Any]) -> str:
    """One sentence for the first thing pydantic found wrong."""
    first = error.errors(include_url=False)[0]
    context = first.get("ctx", {})
    if first["type"] == "draft_config":
        place = maker.place(context["field"], raw)
        return f"{place} {context['message']}. Mend config.json."
    name = str(first["loc"][0])
    place = maker.place(name, raw)
    described = DraftConfig.model_fields[name].description
    if first["type"] == "missing":
        return f"config.json has no {place}. It is needed: {described}"
    return (
        f"{place} is {_shown(first['input'])} in config.json: {first['msg'].lower()}. "
        f"It is: {described}"
    )


def _shown(value: Any, length: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."
