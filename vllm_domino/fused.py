# SPDX-License-Identifier: Apache-2.0
"""Rollouts for a GPU, in few Triton kernels: the whole vocabulary scored position by
position, or guessed and checked.

Fixed shapes and no host synchronisation, so a CUDA graph can hold them.
"""

from collections.abc import Callable

import torch

from vllm_domino import kernels
from vllm_domino.scoring import Pool, PoolBlock, promise_of
from vllm_domino.steps import Steps

Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Fused:
    """``dense``; W2's products are never written.

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
        choose: Choose,
    ) -> torch.Tensor:
        """See ``vllm_domino.rollouts.Rollout``."""
        projected = self.steps.project_hidden(hidden)
        return self._dense(projected, base_logits, bonus, choose)

    def _dense(
        self,
        projected: torch.Tensor,
        base_logits: torch.Tensor,
        bonus: torch.Tensor,
        choose: Choose,
        known: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """
        Args:
            known: Drafts (B, K), and how many of them stay, (B,). Where all do, the
                kernels have nothing to do, and find that out themselves.
        """
        steps = self.steps
        todo = None
        if known is not None:
            todo = (known[1] < projected.shape[1]).any().int().view(1)
        state = self._advance(bonus, steps.zeros(len(bonus)), todo)
        drafts: list[torch.Tensor] = []
        for i, z in enumerate(projected.unbind(1)):
            inner = None
            if i >= steps.prefix:
                inner = kernels.bottleneck(z, state, steps.state_weight, todo)
            best = kernels.likeliest(base_logits[:, i], inner, steps.vocab, todo)
            drafts.append(choose(*best))
            if known is not None:
                drafts[-1] = torch.where(known[1] > i, known[0][:, i], drafts[-1])
            if i + 1 < projected.shape[1]:
                state = self._advance(drafts[-1], state, todo)
        return torch.stack(drafts, dim=1)

    def _advance(
        self,
        tokens: torch.Tensor,
        state: torch.Tensor,
        todo: torch.Tensor | None = None,
    ) -> torch.Tensor:
        weights = self.steps.gru_weights
        if self.table is None:
            return torch.gru_cell(self.steps.embed(tokens), state, *weights)
        return kernels.advance(tokens, state, self.table, *weights, todo)


class FusedExact(Fused):
    """``exact``: a block is guessed from a pool and checked in one product, as
    ``vllm_domino.rollouts.Exact`` does, where the proof is. Were any request's guesses
    wrong, what comes after is scored over the whole vocabulary. That is decided on the
    device: those kernels are always launched, and return at once if all were right.

    Args:
        size: Tokens to guess from.
    """

    def __init__(self, steps: Steps, table: torch.Tensor | None, size: int) -> None:
        super().__init__(steps, table)
        self.guesses = Pool(steps.vocab, size)
        self.promise = promise_of(steps.vocab)

    def draft(
        self,
        hidden: torch.Tensor,
        base_logits: torch.Tensor,
        bonus: torch.Tensor,
        choose: Choose,
    ) -> torch.Tensor:
        """See ``vllm_domino.rollouts.Rollout``."""
        projected = self.steps.project_hidden(hidden)
        pool = self.guesses.open_for(
            projected, base_logits, self.steps.prefix, self.promise
        )
        guessed, inner = self._guess(projected, base_logits, pool, bonus, choose)
        # Uncorrected positions too: with a c of zeros they are what they were.
        best = kernels.likeliest(
            base_logits.flatten(0, 1), inner.flatten(0, 1), self.steps.vocab
        )
        right = choose(*best).view(guessed.shape)
        wrong = right != guessed
        num_drafts = guessed.shape[1]
        first = wrong.int().argmax(dim=1)
        settled = torch.where(wrong.any(dim=1), first + 1, num_drafts)
        # Up to the first wrong one, all that was found is dense's.
        return self._dense(projected, base_logits, bonus, choose, (right, settled))

    def _guess(
        self,
        projected: torch.Tensor,
        base_logits: torch.Tensor,
        pool: PoolBlock,
        bonus: torch.Tensor,
        choose: Choose,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Drafts (B, K) from the pool, and each position's c, (B, K, E)."""
        steps = self.steps
        state = self._advance(bonus, steps.zeros(len(bonus)))
        inner = torch.zeros_like(projected)
        drafts: list[torch.Tensor] = []
        for i, z in enumerate(projected.unbind(1)):
            if i < steps.prefix:
                best = kernels.likeliest(base_logits[:, i], None, steps.vocab)
            else:
                inner[:, i] = kernels.bottleneck(z, state, steps.state_weight)
                best = kernels.likeliest_of_pool(
                    pool.logits[:, i], inner[:, i].contiguous(), pool.weight, pool.pool
                )
            drafts.append(choose(*best))
            if i + 1 < projected.shape[1]:
                state = self._advance(drafts[-1], state)
        return torch.stack(drafts, dim=1), inner
