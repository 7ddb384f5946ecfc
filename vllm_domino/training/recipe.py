# SPDX-License-Identifier: Apache-2.0
"""``Recipe``: everything that decides a training run, read from one YAML file."""

from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_domino.errors import DominoError


class RecipeError(DominoError):
    """A recipe, or the data or target it names, cannot be used."""


class DraftShape(BaseModel):
    """The draft to train. What is left out is taken from the target."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    projector: Literal["domino", "none"] = Field(
        default="domino",
        description='"domino": backbone and head. "none": plain DFlash, to compare.',
    )
    num_hidden_layers: int = Field(default=5, gt=0, description="Backbone layers.")
    intermediate_size: int | None = Field(
        default=None, gt=0, description="MLP width; the target's if not given."
    )
    block_size: int = Field(
        default=16, ge=2, description="Query tokens a block, the bonus included."
    )
    target_layer_ids: tuple[int, ...] | None = Field(
        default=None,
        description="Target layers that are the context, from 0; spread evenly, as "
        "many as the draft has layers, if not given.",
    )
    mask_token_id: int | None = Field(
        default=None,
        ge=0,
        description="Id at the positions to be drafted; the tokenizer's mask token, or "
        "the first id past its vocabulary, if not given.",
    )
    shift_label: bool = Field(
        default=True,
        description="True: row j predicts the token after it. False: its own. Plain "
        "DFlash is always False, the only layout that vLLM has for it.",
    )
    pure_draft_prefix_len: int = Field(
        default=1, ge=0, description="Leading drafts that keep the base logits."
    )
    emb_dim: int = Field(default=256, gt=0, description="E, the head's bottleneck.")
    gru_hidden_dim: int = Field(default=1024, gt=0, description="G, the GRU's width.")


class Recipe(BaseModel):
    """A training run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str = Field(description="Folder or hub id of the target; it stays frozen.")
    data: Path = Field(
        description="JSONL of answered prompts, from `vllm-domino train data`."
    )
    output: Path = Field(description="Folder of the run; the draft is in its `draft`.")
    draft: DraftShape = Field(default=DraftShape(), description="The draft's shape.")

    # Curriculum: loss = (1 - lambda) CE(final) + lambda CE(base).
    lambda_start: float = Field(
        default=1.0, ge=0, le=1, description="Weight of the base loss at step 0."
    )
    decay_ratio: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of the steps over which lambda falls to 0, in a line.",
    )
    gamma: float = Field(
        default=7.0,
        gt=0,
        description="Draft k's loss is weighted by exp(-k / gamma): an early mistake "
        "costs all that follows.",
    )

    # Data.
    sequence_length: int = Field(
        default=4096, gt=1, description="Tokens a pack; documents never see each other."
    )
    anchors: int = Field(
        default=512, gt=0, description="Blocks sampled from a pack at each step."
    )
    batch_size: int = Field(default=1, gt=0, description="Packs a process a forward.")
    accumulation: int = Field(
        default=1, gt=0, description="Forwards that make one optimiser step."
    )

    # Optimiser.
    steps: int = Field(gt=0, description="Optimiser steps.")
    learning_rate: float = Field(default=6e-4, gt=0, description="AdamW's peak.")
    warmup_ratio: float = Field(
        default=0.04, ge=0, lt=1, description="Share of the steps to warm up over."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradient clipping.")
    seed: int = Field(default=0, ge=0, description="Of weights, order and anchors.")

    # Machine.
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="Of the target, and of autocast for the draft."
    )
    attention: str = Field(
        default="sdpa",
        description="Transformers' attn_implementation of the draft; flex_attention "
        "for long packs on a GPU.",
    )
    loss_rows: int = Field(
        default=2048,
        gt=0,
        description="Rows whose logits exist at once; their backward recomputes them.",
    )
    save_every: int = Field(default=500, gt=0, description="Steps a checkpoint.")
    log_every: int = Field(default=10, gt=0, description="Steps a logged line.")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads a YAML file; paths in it are relative to where you are.

        Raises:
            RecipeError: The file cannot be read or a field is wrong; names it.
        """
        try:
            raw: Any = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise RecipeError(f"{path}: not a readable YAML file ({error}).") from None
        try:
            return cls.model_validate(raw)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"])) or "the recipe"
            raise RecipeError(
                f"{path}: {name}: {first['msg'].lower()} (found "
                f"{first['input']!r}). See configs/train/ for whole recipes."
            ) from None
