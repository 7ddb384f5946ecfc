# SPDX-License-Identifier: Apache-2.0
"""Greedy rollouts: K tokens a request, each the likeliest after those before it.

Shapes: B requests, K drafts, H width, V vocabulary (of one rank).
"""

from collections.abc import Callable
from typing import Protocol

import torch

from vllm_domino.scoring import Block, Scorer
from vllm_domino.steps import Steps

# Values and ids, (N,) each, of one rank's likeliest tokens -> (N,) tokens to draft.
Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Rollout(Protocol):
    def draft(
        self,
        hidden: torch.Tensor,
        base_logits: torch.Tensor,
        bonus: torch.Tensor,
        choose: Choose,
    ) -> torch.Tensor:
        """Drafts (B, K) tokens, int64.

        Args:
            hidden: (B, K, H) the backbone's rows that predict the K drafts, after its
                final norm.
            base_logits: (B, K, V) those rows through the target's lm_head; one rank's
                part of the vocabulary will do.
            bonus: (B,) the token each block continues.
            choose: Makes of a rank's likeliest the token that is drafted.
        """
        ...


def walk(
    steps: Steps,
    block: Block,
    projected: torch.Tensor,
    bonus: torch.Tensor,
    choose: Choose,
    known: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Drafts (B, K) tokens position by position, each the block's best.

    Args:
        projected: (B, K, E) ``steps.project_hidden`` of the backbone's rows.
        known: Drafts (B, K), and how many of them stay, (B,).
    """
    state = steps.start(bonus)
    drafts: list[torch.Tensor] = []
    for i, z in enumerate(projected.unbind(1)):
        inner = None if i < steps.prefix else steps.bottleneck(z, state)
        drafts.append(choose(*block.best(i, inner)))
        if known is not None:
            drafts[-1] = torch.where(known[1] > i, known[0][:, i], drafts[-1])
        if i + 1 < projected.shape[1]:
            state = steps.advance(drafts[-1], state)
    return torch.stack(drafts, dim=1)


class StepByStep:
    """Scores position after position: all of the vocabulary, or a pool of it."""

    def __init__(self, steps: Steps, scorer: Scorer) -> None:
        self.steps = steps
        self.scorer = scorer

    def draft(
        self,
        hidden: torch.Tensor,
        base_logits: torch.Tensor,
        bonus: torch.Tensor,
        choose: Choose,
    ) -> torch.Tensor:
        """See ``Rollout``."""
        block = self.scorer.open(base_logits, self.steps.prefix)
        projected = self.steps.project_hidden(hidden)
        return walk(self.steps, block, projected, bonus, choose)
