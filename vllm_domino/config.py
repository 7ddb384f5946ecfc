# SPDX-License-Identifier: Apache-2.0
"""``DraftConfig``: what a Domino draft is, read once from its config.json.

Two layouts are read here, which differ only in their architecture's name: the released
drafts (``DFlashDraftModel``, told from plain DFlash by ``projector_type``) and
SpecForge's (``DominoDraftModel``).
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    model_validator,
)

from vllm_domino.errors import DraftConfigError

DOMINO_PROJECTOR = "domino"
# Names that can only mean Domino. The released drafts say "DFlashDraftModel", which
# plain DFlash drafts say too.
DOMINO_ARCHITECTURES = ("DominoDraftModel", "DFlashDominoDraftModel")
DFLASH_ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel")

# Tensor names of the head are fixed by these; nothing else would load.
_HEAD_SECTION = "dflash_config"
_HEAD_FIELDS = (
    "target_layer_ids",
    "mask_token_id",
    "pure_draft_prefix_len",
    "shift_label",
    "emb_dim",
    "gru_hidden_dim",
)


# How many rows a block has that drafts fewer tokens than it was trained for: those it
# was trained with, of which the first are used, or just those that are needed.
DraftBlock = Literal["trained", "short"]


class RuntimeConfig(BaseModel):
    """What a user chooses beside vLLM's own settings, in the same JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    draft_block: DraftBlock = Field(
        default="short",
        description="Rows of a block that drafts fewer tokens than it was trained for: "
        '"trained" (as many as in training, of which the first are used) or "short" '
        "(as many as are needed).",
    )


class DraftConfig(BaseModel):
    """A Domino draft, as its maker described it. Frozen; every field is a number
    that fixes a tensor's shape or the meaning of a draft."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # The backbone: Qwen3-style decoder layers.
    hidden_size: StrictInt = Field(gt=0, description="H, width of draft and target.")
    vocab_size: StrictInt = Field(gt=0, description="V, the target's vocabulary.")
    num_hidden_layers: StrictInt = Field(gt=0, description="Layers of the backbone.")
    num_attention_heads: StrictInt = Field(gt=0, description="Query heads a layer.")
    num_key_value_heads: StrictInt = Field(gt=0, description="K/V heads a layer.")
    head_dim: StrictInt = Field(gt=0, description="Width of one attention head.")
    intermediate_size: StrictInt = Field(gt=0, description="Width of the MLP.")
    attention_bias: StrictBool = Field(
        default=False, description="Whether q, k, v and o projections carry a bias."
    )

    # What the backbone sees and predicts.
    block_size: StrictInt = Field(
        ge=2, description="Query tokens a block had in training, the bonus included."
    )
    target_layer_ids: tuple[StrictInt, ...] = Field(
        min_length=1,
        description="Target layers whose outputs are the context, counted from 0.",
    )
    mask_token_id: StrictInt = Field(
        ge=0, description="Token id that stands at the positions to be drafted."
    )
    num_target_layers: StrictInt | None = Field(
        default=None, gt=0, description="Layers of the target it was trained for."
    )
    draft_vocab_size: StrictInt | None = Field(
        default=None,
        gt=0,
        description="Tokens the draft can draft, where fewer than the target has; "
        "tensor d2t says which. Left out: all of them.",
    )

    # The head.
    shift_label: StrictBool = Field(
        description="True: row j predicts the token after it, so a block of n rows "
        "drafts n tokens. False: row j predicts its own, and n rows draft n - 1."
    )
    pure_draft_prefix_len: StrictInt = Field(
        ge=0, description="Leading drafts that keep the backbone's own logits."
    )
    emb_dim: StrictInt = Field(gt=0, description="E, the head's bottleneck.")
    gru_hidden_dim: StrictInt = Field(gt=0, description="G, width of the head's GRU.")

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        ids = self.target_layer_ids
        if ids[0] < 0 or any(a >= b for a, b in pairwise(ids)):
            raise ValueError(
                f"dflash_config.target_layer_ids is {list(ids)}; expected layer "
                "numbers from 0 up, rising and none twice"
            )
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"dflash_config.mask_token_id is {self.mask_token_id}, outside the "
                f"vocabulary; expected an id from 0 to {self.vocab_size - 1}"
            )
        if self.pure_draft_prefix_len >= self.max_drafts:
            raise ValueError(
                f"dflash_config.pure_draft_prefix_len is {self.pure_draft_prefix_len}, "
                f"but a block drafts {self.max_drafts} tokens; expected less, or the "
                "head never corrects anything"
            )
        if (size := self.draft_vocab_size) is not None and size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {size}, more than the target's vocabulary "
                f"(vocab_size {self.vocab_size}); expected at most that"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}; expected a "
                f"multiple of num_key_value_heads ({self.num_key_value_heads})"
            )
        return self

    @property
    def max_drafts(self) -> int:
        """K the draft was trained for, and the most it can draft."""
        return self.block_size if self.shift_label else self.block_size - 1

    @property
    def drafted_vocab(self) -> int:
        """How many tokens the head scores; ``d2t`` maps them if fewer than V."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def has_reduced_vocab(self) -> bool:
        return self.drafted_vocab < self.vocab_size

    def num_query_rows(self, num_drafts: int, draft_block: DraftBlock) -> int:
        """Query tokens a block has when it drafts K tokens, the bonus included."""
        if draft_block == "trained":
            return self.block_size
        return num_drafts if self.shift_label else num_drafts + 1

    @classmethod
    def of(cls, draft_model_config: Any) -> Self:
        """Reads it back from vLLM's ``ModelConfig`` of the draft."""
        raw = draft_model_config.hf_config.to_dict()
        return cls.from_hf(raw, draft_model_config.model)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], source: str) -> Self:
        """Reads a config.json.

        Args:
            raw: The parsed file, or an HF config's ``to_dict()``.
            source: What to call the draft in an error: its path or hub id.

        Raises:
            DraftConfigError: It is not a Domino draft, or not a usable one.
        """
        section = raw.get(_HEAD_SECTION)
        if not isinstance(section, Mapping):
            raise DraftConfigError(
                f"{source}: config.json has no {_HEAD_SECTION!r} section, so this is "
                "not a Domino draft. Point speculative_config.model at one, or name "
                "the method that this checkpoint is for."
            )
        _require_domino(raw, section, source)
        if raw.get("quantization_config"):
            raise DraftConfigError(
                f"{source}: quantization_config is set, but a quantised Domino draft "
                "cannot be read. Use the unquantised draft; the target may be "
                "quantised as you like."
            )
        fields = {name: raw[name] for name in _BACKBONE_FIELDS if name in raw}
        fields |= {name: section[name] for name in _HEAD_FIELDS if name in section}
        if "block_size" in section:
            fields["block_size"] = section["block_size"]
        if fields.get("head_dim") is None:
            fields.pop("head_dim", None)
            fields |= _default_head_dim(fields)
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise DraftConfigError(f"{source}: {_explain(error)}") from None


# Where the choice travels to the workers: an attribute of the draft's HF config.
_RUNTIME_ATTRIBUTE = "domino_runtime"


def set_runtime(draft_model_config: Any, runtime: RuntimeConfig) -> None:
    setattr(draft_model_config.hf_config, _RUNTIME_ATTRIBUTE, runtime.model_dump())


def num_query_rows(speculative_config: Any) -> int:
    """Query rows of each request's block in an engine: vLLM's ``SpeculativeConfig``."""
    draft = speculative_config.draft_model_config
    runtime = RuntimeConfig(**getattr(draft.hf_config, _RUNTIME_ATTRIBUTE, {}))
    num_drafts = speculative_config.num_speculative_tokens
    return DraftConfig.of(draft).num_query_rows(num_drafts, runtime.draft_block)


_BACKBONE_FIELDS = tuple(f for f in DraftConfig.model_fields if f not in _HEAD_FIELDS)


def is_domino(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json says that it is a Domino draft's."""
    section = raw.get(_HEAD_SECTION)
    named = any(a in DOMINO_ARCHITECTURES for a in raw.get("architectures") or ())
    return named or (
        isinstance(section, Mapping)
        and section.get("projector_type") == DOMINO_PROJECTOR
    )


def _require_domino(
    raw: Mapping[str, Any], section: Mapping[str, Any], source: str
) -> None:
    architectures = list(raw.get("architectures") or ())
    known = DOMINO_ARCHITECTURES + DFLASH_ARCHITECTURES
    if not any(a in known for a in architectures):
        raise DraftConfigError(
            f"{source}: architectures is {architectures}, not a Domino draft's "
            f"(expected one of {', '.join(known)})."
        )
    # SpecForge's class name says Domino by itself; its older files omit the type.
    named = any(a in DOMINO_ARCHITECTURES for a in architectures)
    projector = section.get("projector_type", DOMINO_PROJECTOR if named else None)
    if projector is None:
        raise DraftConfigError(
            f"{source}: dflash_config has no projector_type, so this is a plain "
            'DFlash draft. Set "method": "dflash" to use it as one.'
        )
    if projector != DOMINO_PROJECTOR:
        raise DraftConfigError(
            f"{source}: dflash_config.projector_type is {projector!r}; expected "
            f"{DOMINO_PROJECTOR!r}, the only head that this version knows. A newer "
            "vllm-domino may know it."
        )


def _default_head_dim(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What Qwen3 configs mean when they leave head_dim out."""
    hidden, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        return {"head_dim": hidden // heads}
    return {}


def _explain(error: ValidationError) -> str:
    """One sentence for the first thing pydantic found wrong."""
    first = error.errors()[0]
    if not first["loc"]:
        return first["msg"].removeprefix("Value error, ") + ". Mend config.json."
    name = str(first["loc"][0])
    path = f"{_HEAD_SECTION}.{name}" if name in _HEAD_FIELDS else name
    described = DraftConfig.model_fields[name].description
    if first["type"] == "missing":
        return f"config.json has no {path}. It is needed: {described}"
    return (
        f"{path} is {first['input']!r} in config.json: {first['msg'].lower()}. "
        f"It is: {described}"
    )
