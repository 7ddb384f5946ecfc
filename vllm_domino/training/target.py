# SPDX-License-Identifier: Apache-2.0
"""The frozen target: what training reads from it, and the draft shaped after it."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_domino.makers.layout import DOMINO_PROJECTOR
from vllm_domino.modeling_domino import DominoConfig, DominoDraftModel
from vllm_domino.training.data import PADDING, Packs
from vllm_domino.training.recipe import Recipe, RecipeError


class Target:
    """A causal LM whose weights never change.

    Attributes:
        embed: Its token embedding.
        lm_head: Its output projection.
        config: Its text config.
    """

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        dtype = getattr(torch, recipe.dtype)
        try:
            self.model = AutoModelForCausalLM.from_pretrained(
                recipe.target, dtype=dtype, attn_implementation="sdpa"
            )
        except (OSError, ValueError) as error:
            raise RecipeError(
                f"target: {recipe.target!r} cannot be loaded ({error})."
            ) from None
        self.model.requires_grad_(False).eval().to(device)
        self.config = self.model.config.get_text_config()
        self.embed: nn.Module = self.model.get_input_embeddings()
        self.lm_head: nn.Module = self.model.get_output_embeddings()
        if recipe.sequence_length > self.config.max_position_embeddings:
            raise RecipeError(
                f"sequence_length is {recipe.sequence_length}, but the target has "
                f"{self.config.max_position_embeddings} positions. Lower it."
            )

    @torch.no_grad()
    def features(self, draft: DominoDraftModel, packs: Packs) -> torch.Tensor:
        """(N, T, layers * H) hidden states, no document seeing another."""
        length = packs.tokens.shape[1]
        same = packs.documents[:, :, None] == packs.documents[:, None]
        causal = torch.ones(length, length, dtype=torch.bool, device=same.device).tril()
        output = self.model.base_model(
            input_ids=packs.tokens,
            attention_mask=(same & causal)[:, None],
            position_ids=packs.positions,
            output_hidden_states=True,
            use_cache=False,
        )
        features = draft.context_features(output.hidden_states)
        # Padding rows hold nothing; a NaN there would spread through a masked softmax.
        return features.masked_fill((packs.documents == PADDING)[..., None], 0)


def make_draft(recipe: Recipe, target: Target) -> DominoDraftModel:
    """A new draft of the recipe's shape, its weights decided by the seed.

    Raises:
        RecipeError: The shape does not fit the target.
    """
    shape, base = recipe.draft, target.config
    if shape.projector == "none" and shape.shift_label:
        shape = shape.model_copy(update={"shift_label": False})
    section: dict[str, Any] = {
        "target_layer_ids": list(_target_layer_ids(recipe, base.num_hidden_layers)),
        "mask_token_id": _mask_token_id(recipe, target),
    }
    if shape.projector == DOMINO_PROJECTOR:
        section |= {
            "projector_type": DOMINO_PROJECTOR,
            "shift_label": shape.shift_label,
            "pure_draft_prefix_len": shape.pure_draft_prefix_len,
            "emb_dim": shape.emb_dim,
            "gru_hidden_dim": shape.gru_hidden_dim,
        }
    config = DominoConfig(
        vocab_size=base.vocab_size,
        hidden_size=base.hidden_size,
        intermediate_size=shape.intermediate_size or base.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=base.num_attention_heads,
        num_key_value_heads=base.num_key_value_heads,
        head_dim=getattr(base, "head_dim", None)
        or base.hidden_size // base.num_attention_heads,
        rms_norm_eps=base.rms_norm_eps,
        rope_parameters=base.rope_parameters,
        max_position_embeddings=base.max_position_embeddings,
        tie_word_embeddings=False,
        block_size=shape.block_size,
        num_target_layers=base.num_hidden_layers,
        dflash_config=section,
        attn_implementation=recipe.attention,
    )
    torch.manual_seed(recipe.seed)
    return DominoDraftModel(config)


def _target_layer_ids(recipe: Recipe, num_layers: int) -> tuple[int, ...]:
    ids = recipe.draft.target_layer_ids
    if ids is None:
        count = recipe.draft.num_hidden_layers
        # From the second layer to the third from last, as the released drafts have it.
        first, last = min(1, num_layers - 1), max(1, num_layers - 3)
        spread = torch.linspace(first, last, count).round().int().tolist()
        return tuple(sorted(set(spread)))
    if list(ids) != sorted(set(ids)) or not ids or ids[0] < 0:
        raise RecipeError(
            f"draft.target_layer_ids is {list(ids)}; expected layer numbers from 0 up, "
            "rising and none twice."
        )
    if ids[-1] >= num_layers:
        raise RecipeError(
            f"draft.target_layer_ids asks for layer {ids[-1]}, but the target "
            f"{recipe.target} has {num_layers} layers (0 to {num_layers - 1})."
        )
    return ids


def _mask_token_id(recipe: Recipe, target: Target) -> int:
    vocab_size: int = target.config.vocab_size
    wanted = recipe.draft.mask_token_id
    if wanted is None:
        tokenizer = AutoTokenizer.from_pretrained(recipe.target)
        wanted = tokenizer.mask_token_id
        if wanted is None:
            wanted = len(tokenizer)
    if wanted >= vocab_size:
        raise RecipeError(
            f"draft.mask_token_id would be {wanted}, but the target's embedding ends "
            f"at {vocab_size - 1}: its tokenizer leaves no room for a mask token. Set "
            "draft.mask_token_id to an id that no text uses."
        )
    return wanted
