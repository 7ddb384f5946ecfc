# SPDX-License-Identifier: Apache-2.0
"""``DraftConfig``: what a Domino draft is, whoever made it.

``makers`` reads it from each maker's config.json; everything after that, the door, the
weights' check and the models, knows only this.
"""

from itertools import pairwise
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    model_validator,
)
from pydantic_core import PydanticCustomError

# How many rows a block has that drafts fewer tokens than it was trained for: those it
# was trained with, of which the first are used, or just those that are needed.
DraftBlock = Literal["trained", "short"]


# How greedy drafts are computed; see ``RuntimeConfig.head``.
HeadMode = Literal["dense", "exact", "pool", "fused"]


class RuntimeConfig(BaseModel):
    """What a user chooses beside vLLM's own settings, in the same JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    draft_block: DraftBlock = Field(
        default="short",
        description="Rows of a block that drafts fewer tokens than it was trained for: "
        '"trained" (as many as in training, of which the first are used) or "short" '
        "(as many as are needed).",
    )
    head: HeadMode | None = Field(
        default=None,
        description='How greedy drafts find the likeliest token: "dense" scores the '
        'whole vocabulary position by position, "exact" guesses a block and checks it '
        'at once, for the same tokens, "pool" only the pool_size likeliest before '
        'correction, which may draft others, "fused" is dense in fewer, larger '
        "kernels. Left out: what is known to be the fastest of those that draft what "
        "dense does.",
    )
    pool_size: StrictInt | None = Field(
        default=None,
        gt=0,
        le=2**24,
        description='Tokens that head "pool" considers (2048 if left out), or that '
        '"exact" guesses from (512).',
    )
    project_embeddings: StrictBool = Field(
        default=False,
        description="Whether the GRU's input is worked out for every token when the "
        "engine starts; it takes 3 numbers times vocabulary times GRU width (0.93 GB "
        "for Qwen3-8B) and saves the reading of the GRU's input weights at every "
        "draft.",
    )
    allow_pickle: StrictBool = Field(
        default=False,
        description="Whether weights may be read from pickled files (*.bin), and then "
        "as plain tensors only, where a draft has no safetensors.",
    )


# Far above any model there is, and low enough that a slip of the keyboard is refused
# before it asks for terabytes. Ranks exchange token ids as float32, exact up to 2**24.
_MAX_WIDTH = 2**20
_MAX_VOCAB = 2**24
_MAX_LAYERS = 1024
_MAX_HEADS = 2**12
_MAX_BLOCK = 1024


class DraftConfig(BaseModel):
    """A Domino draft, as its maker described it. Frozen; every field is a number
    that fixes a tensor's shape or the meaning of a draft."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # The backbone: Qwen3-style decoder layers.
    hidden_size: StrictInt = Field(
        gt=0, le=_MAX_WIDTH, description="H, width of draft and target."
    )
    vocab_size: StrictInt = Field(
        gt=0, le=_MAX_VOCAB, description="V, the target's vocabulary."
    )
    num_hidden_layers: StrictInt = Field(
        gt=0, le=_MAX_LAYERS, description="Layers of the backbone."
    )
    num_attention_heads: StrictInt = Field(
        gt=0, le=_MAX_HEADS, description="Query heads a layer."
    )
    num_key_value_heads: StrictInt = Field(
        gt=0, le=_MAX_HEADS, description="K/V heads a layer."
    )
    head_dim: StrictInt = Field(
        default=128,
        gt=0,
        le=_MAX_WIDTH,
        description="Width of one attention head; Qwen3's own default if left out.",
    )
    intermediate_size: StrictInt = Field(
        gt=0, le=_MAX_WIDTH, description="Width of the MLP."
    )
    attention_bias: StrictBool = Field(
        default=False, description="Whether q, k, v and o projections carry a bias."
    )

    # What the backbone sees and predicts.
    block_size: StrictInt = Field(
        ge=2,
        le=_MAX_BLOCK,
        description="Query tokens a block had in training, the bonus included.",
    )
    target_layer_ids: tuple[StrictInt, ...] = Field(
        min_length=1,
        description="Target layers whose outputs are the context, counted from 0.",
    )
    mask_token_id: StrictInt = Field(
        ge=0, description="Token id that stands at the positions to be drafted."
    )
    num_target_layers: StrictInt | None = Field(
        default=None,
        gt=0,
        le=_MAX_LAYERS,
        description="Layers of the target it was trained for.",
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
    emb_dim: StrictInt = Field(
        gt=0, le=_MAX_WIDTH, description="E, the head's bottleneck."
    )
    gru_hidden_dim: StrictInt = Field(
        gt=0, le=_MAX_WIDTH, description="G, width of the head's GRU."
    )

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        ids = self.target_layer_ids
        if ids[0] < 0 or any(a >= b for a, b in pairwise(ids)):
            raise _wrong(
                "target_layer_ids",
                f"is {list(ids)}; expected layer numbers from 0 up, rising and none "
                "twice",
            )
        if self.mask_token_id >= self.vocab_size:
            raise _wrong(
                "mask_token_id",
                f"is {self.mask_token_id}, outside the vocabulary; expected an id from "
                f"0 to {self.vocab_size - 1}",
            )
        if self.pure_draft_prefix_len >= self.max_drafts:
            raise _wrong(
                "pure_draft_prefix_len",
                f"is {self.pure_draft_prefix_len}, but a block drafts "
                f"{self.max_drafts} tokens; expected less, or the head never corrects "
                "anything",
            )
        if (size := self.draft_vocab_size) is not None and size > self.vocab_size:
            raise _wrong(
                "draft_vocab_size",
                f"is {size}, more than the target's vocabulary (vocab_size "
                f"{self.vocab_size}); expected at most that",
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise _wrong(
                "num_attention_heads",
                f"is {self.num_attention_heads}; expected a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})",
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


def _wrong(field: str, message: str) -> PydanticCustomError:
    """What is wrong with a field, for whoever knows what config.json calls it."""
    return PydanticCustomError(
        "draft_config", "{message}", {"field": field, "message": message}
    )


class Drafting(BaseModel):
    """All that an engine's workers need to know of a draft. It travels in the draft's
    HF config, which vLLM hands to each of them."""

    model_config = ConfigDict(frozen=True)

    draft: DraftConfig
    maker: str
    runtime: RuntimeConfig

    @classmethod
    def of(cls, draft_model_config: Any) -> Self:
        """Reads it back from vLLM's ``ModelConfig`` of the draft."""
        return cls.model_validate(getattr(draft_model_config.hf_config, _ATTRIBUTE))

    def attach(self, draft_model_config: Any) -> None:
        setattr(draft_model_config.hf_config, _ATTRIBUTE, self.model_dump())


_ATTRIBUTE = "vllm_domino"


def num_query_rows(speculative_config: Any) -> int:
    """Query rows of each request's block in an engine: vLLM's ``SpeculativeConfig``."""
    drafting = Drafting.of(speculative_config.draft_model_config)
    return drafting.draft.num_query_rows(
        speculative_config.num_speculative_tokens, drafting.runtime.draft_block
    )
