# SPDX-License-Identifier: Apache-2.0
"""The draft model inside vLLM: DFlash's backbone, and the Domino head on top.

Its layers live in vLLM's paged KV cache, in the same blocks as the target's; the token
embedding and the lm_head are the target's own.

Differences from ``DFlashQwen3ForCausalLM``:
  * ``draft`` picks a block's tokens one after the other through the head.
  * Context keys are normalised layer by layer.
  * Weights are refused unless they are a whole Domino draft.
"""

from collections.abc import Iterable

import torch
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import (
    DFlashQwen3ForCausalLM,
    DFlashQwen3Model,
)

from vllm_domino.checkpoint import HEAD_PREFIXES, check_tensors
from vllm_domino.config import DraftConfig
from vllm_domino.head import DominoHead, HeadShape, Pick, greedy, rollout


class DominoBackbone(DFlashQwen3Model):
    """DFlash's backbone with the context keys of every layer right on a CPU too."""

    def _normalize_context_k(self, all_k: torch.Tensor) -> torch.Tensor:
        """Applies each layer's own k_norm: (L, tokens, kv_heads, head_dim) -> same.

        vLLM hands the kernel the weights of all layers at once; its CPU kernel then
        uses layer 0's for all (vLLM 0.32).
        """
        normed = torch.empty_like(all_k)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(normed[layer], all_k[layer], weight, self._rms_norm_eps)
        return normed


class DominoForCausalLM(DFlashQwen3ForCausalLM):
    """A Domino draft: ``model`` is the backbone, ``head`` the correction."""

    model_cls = DominoBackbone

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.source: str = self.draft_model_config.model
        self.draft_config = DraftConfig.of(self.draft_model_config)
        self.head = DominoHead(
            HeadShape(
                hidden_size=self.draft_config.hidden_size,
                gru_hidden_dim=self.draft_config.gru_hidden_dim,
                emb_dim=self.draft_config.emb_dim,
                vocab_size=self.draft_config.vocab_size,
            ),
            self.draft_config.pure_draft_prefix_len,
        )

    def draft(
        self,
        # [num_reqs * num_drafts, hidden_size], request-major
        hidden_states: torch.Tensor,
        # [num_reqs]
        bonus: torch.Tensor,
        pick: Pick = greedy,
    ) -> torch.Tensor:
        """Drafts a block a request: [num_reqs, num_drafts] token ids."""
        num_reqs = bonus.shape[0]
        base_logits = self.compute_logits(hidden_states)
        return rollout(
            self.head,
            hidden_states.view(num_reqs, -1, hidden_states.shape[-1]),
            base_logits.view(num_reqs, -1, base_logits.shape[-1]),
            bonus,
            self.model.embed_tokens,
            pick,
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        tensors = dict(weights)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        check_tensors(self.draft_config, shapes, self.source)
        head = {
            name: tensors.pop(name)
            for name in list(tensors)
            if name.startswith(HEAD_PREFIXES)
        }
        super().load_weights(tensors.items())
        self.head.load_state_dict(head)
