# SPDX-License-Identifier: Apache-2.0
"""``Maker``: how one trainer lays out a draft, as data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_domino.config import DraftConfig

DOMINO_PROJECTOR = "domino"
# A field's places in config.json, dotted; the first that is there counts.
Paths = Mapping[str, tuple[str, ...]]

SECTION = "dflash_config"
_HEAD_FIELDS = (
    "target_layer_ids",
    "mask_token_id",
    "pure_draft_prefix_len",
    "shift_label",
    "emb_dim",
    "gru_hidden_dim",
)

# The released drafts' places, which most makers share: the backbone as Transformers
# keeps a Qwen3 config, the rest in a section of its own.
FLAT_PATHS: Paths = {
    name: (f"{SECTION}.{name}",) if name in _HEAD_FIELDS else (name,)
    for name in DraftConfig.model_fields
} | {"block_size": (f"{SECTION}.block_size", "block_size")}


@dataclass(frozen=True)
class Maker:
    """One maker's layout.

    Attributes:
        name: What the command line calls it.
        title: What people call it.
        claims: Whether a config.json is laid out this way.
        paths: Where config.json has each field of ``DraftConfig``.
        nested: Where it has the backbone's HF fields; at the top if empty.
        marks: Places whose value vLLM knows the layout by.
        projector: Where it has the projector's type, that tells Domino from its kin.
        implied_projector: What that is where the file does not say.
        defaults: What this maker's own code takes for a field that is left out.
        prefixes: Beginnings of tensor names, (theirs, ours), that are read.
        written_prefixes: Those of them that are written too.
        adjust: Turns the fields as they were read into ``DraftConfig``'s, in place.
        write: Lays out a config.json this way, from the draft, the backbone's HF fields
            and the target's name; None where this layout is only read.
    """

    name: str
    title: str
    claims: Callable[[Mapping[str, Any]], bool]
    paths: Paths = field(default_factory=lambda: FLAT_PATHS)
    nested: str = ""
    marks: Mapping[str, str] = field(default_factory=dict)
    projector: str = f"{SECTION}.projector_type"
    implied_projector: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    prefixes: tuple[tuple[str, str], ...] = ()
    written_prefixes: tuple[tuple[str, str], ...] = ()
    adjust: Callable[[dict[str, Any]], None] | None = None
    write: Callable[[DraftConfig, dict[str, Any], str], dict[str, Any]] | None = None

    def place(self, name: str, raw: Mapping[str, Any]) -> str:
        """Where this config.json has a field, or should have it."""
        places = self.paths[name]
        return next((p for p in places if look_up(raw, p) is not MISSING), places[-1])

    def backbone(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the backbone's HF config, as Transformers names them."""
        fields = look_up(raw, self.nested) if self.nested else raw
        return {key: value for key, value in fields.items() if key != SECTION}

    def ours(self, tensor: str) -> str:
        """What we call a tensor of theirs."""
        for theirs, ours in self.prefixes:
            if tensor.startswith(theirs):
                return ours + tensor.removeprefix(theirs)
        return tensor

    def theirs(self, tensor: str) -> str:
        """What they call a tensor of ours."""
        for theirs, ours in self.written_prefixes:
            if tensor.startswith(ours):
                return theirs + tensor.removeprefix(ours)
        return tensor


class _Missing:
    """Stands for what is not in a file, which None (null) is."""


MISSING = _Missing()


def look_up(raw: Mapping[str, Any], place: str) -> Any:
    """The value at a dotted place, or ``MISSING``."""
    value: Any = raw
    for key in place.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return MISSING
        value = value[key]
    return value


def architectures(raw: Mapping[str, Any]) -> list[str]:
    """Those a config.json names; none if it does not say."""
    named = raw.get("architectures")
    if not isinstance(named, list | tuple):
        return []
    return [name for name in named if isinstance(name, str)]


def head_section(draft: DraftConfig) -> dict[str, Any]:
    """The section of the released layout, for a draft."""
    fields = draft.model_dump(mode="json")
    section = {name: fields[name] for name in _HEAD_FIELDS}
    return {"projector_type": DOMINO_PROJECTOR} | section


def write_flat(
    draft: DraftConfig, backbone: dict[str, Any], architecture: str
) -> dict[str, Any]:
    """A config.json of the released layout, under a maker's own architecture."""
    fields = draft.model_dump(mode="json", exclude_none=True)
    places = {name: fields[name] for name in fields if name not in _HEAD_FIELDS}
    return (
        backbone
        | places
        | {"architectures": [architecture], "model_type": "qwen3"}
        | {SECTION: head_section(draft)}
    )
