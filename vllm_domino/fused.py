# SPDX-License-Identifier: Apache-2.0
"""``dense`` for a GPU, in few kernels: the whole vocabulary scored position by
position, without W2's products ever being written."""

from collections.abc import Callable

import torch

from vllm_domino import kernels
from vllm_domino.steps import Steps


class Fused:
    """Fixed shapes and no host synchronisation, so a CUDA graph can hold it.

    Args:
        table: (V, H) the target's embedding; None where no rank has all of it, and then
            the embedding is looked up, and the GRU run, by torch.
    """

    def __init__(self, steps: Steps, table: torch.Tensor | None) -> None:
        self.steps = steps
        self.table = table

    def draft(
        self,
        hidden: torch.Tensor,
        base_logits: torch.Tensor,
        bonus: torch.Tensor,
        choose: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """See ``vllm_domino.rollouts.Rollout``."""
        steps = self.steps
        projected = steps.project_hidden(hidden).unbind(1)
        base = base_logits.unbind(1)
        state = self._advance(bonus, steps.zeros(len(bonus)))
        drafts: list[torch.Tensor] = []
        for i in range(len(projected)):
            inner = None
            if i >= steps.prefix:
                inner = kernels.bottleneck(projected[i], state, steps.state_weight)
            drafts.append(choose(*kernels.likeliest(base[i], inner, steps.vocab)))
            if i + 1 < len(projected):
                state = self._advance(drafts[-1], state)
        return torch.stack(drafts, dim=1)

    def _advance(self, tokens: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            embedding = self.steps.embed(tokens)
            return torch.gru_cell(embedding, state, *self.steps.gru_weights)
        return kernels.advance(tokens, state, self.table, *self.steps.gru_weights)
