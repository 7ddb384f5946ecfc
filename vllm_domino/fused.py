# SPDX-License-Identifier: Apache-2.0
"""Rollouts for a GPU, in few Triton kernels: ``StepByStep`` of ``FusedSteps`` and
``FusedDense`` scores the whole vocabulary position by position, W2's products never
written; ``FusedExact`` guesses and checks.

Fixed shapes and no host synchronisation, so a CUDA graph can hold them.
"""

import copy
from typing import Self

import torch

from vllm_domino import kernels
from vllm_domino.rollouts import Choose, walk
from vllm_domino.scoring import Block, Pool, PoolBlock, promise_of
from vllm_domino.steps import State, Steps
from vllm_domino.vocabulary import Best


class FusedSteps(Steps):
    """The head's steps, a kernel each.

    Args:
        table: (V, H) the target's embedding; None where no rank has all of it. Then,
            and where embeddings are projected, the GRU runs in torch.
    """

    def __init__(self, steps: Steps, table: torch.Tensor | None) -> None:
        super().__init__(steps.head, steps.embed, steps.gates)
        self.table = table
        self.todo: torch.Tensor | None = None

    def only_if(self, todo: torch.Tensor) -> Self:
        """The same, whose kernels do nothing where ``todo``, (1,) int32, is 0."""
        conditional = copy.copy(self)
        conditional.todo = todo
        return conditional

    def bottleneck(self, projected_hidden: torch.Tensor, state: State) -> torch.Tensor:
        return kernels.bottleneck(
            projected_hidden, state.hidden, self.state_weight, self.todo
        )

    def advance(
        self, tokens: torch.Tensor, state: State, gates: torch.Tensor | None = None
    ) -> State:
        if self.table is None or self.gates is not None:
            return super().advance(tokens, state, gates)
        weights = self.gru_weights
        return State(
            kernels.advance(tokens, state.hidden, self.table, *weights, self.todo)
        )


class FusedDense:
    """Scores every token, and writes none of the scores."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight  # W2: (V, E)

    def open(
        self, base_logits: torch.Tensor, first: int, todo: torch.Tensor | None = None
    ) -> Block:
        return _FusedBlock(self.weight, base_logits, todo)


class _FusedBlock:
    def __init__(
        self,
        weight: torch.Tensor,
        base_logits: torch.Tensor,
        todo: torch.Tensor | None = None,
    ) -> None:
        self.weight = weight
        self.base_logits = base_logits
        self.todo = todo

    def best(self, position: int, inner: torch.Tensor | None) -> Best:
        base = self.base_logits[:, position]
        return kernels.likeliest(base, inner, self.weight, self.todo)


class _GuessedBlock(_FusedBlock):
    """Scores a pool, and keeps each position's c; zeros where there is none."""

    def __init__(self, weight: torch.Tensor, pool: PoolBlock) -> None:
        super().__init__(weight, pool.base_logits)
        self.pool = pool
        self.inners: list[torch.Tensor] = []

    def best(self, position: int, inner: torch.Tensor | None) -> Best:
        if inner is None:
            num_reqs, width = len(self.base_logits), self.weight.shape[1]
            self.inners.append(self.weight.new_zeros(num_reqs, width))
            return super().best(position, inner)
        self.inners.append(inner)
        pool = self.pool
        return kernels.likeliest_of_pool(
            pool.logits[:, position], inner, pool.weight, pool.pool
        )


class FusedExact:
    """``exact``: a block is guessed from a pool and checked in one product, as
    ``vllm_domino.exact.Exact`` does, where the proof is. Were any request's guesses
    wrong, what comes after is scored over the whole vocabulary. That is decided on the
    device: those kernels are always launched, and return at once if all were right.

    Args:
        size: Tokens to guess from.
    """

    def __init__(self, steps: FusedSteps, size: int) -> None:
        self.steps = steps
        self.dense = FusedDense(steps.vocab)
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
        steps = self.steps
        projected = steps.project_hidden(hidden)
        pool = self.guesses.open_for(projected, base_logits, steps.prefix, self.promise)
        block = _GuessedBlock(steps.vocab, pool)
        guessed = walk(steps, block, projected, bonus, choose)
        # Uncorrected positions too: with a c of zeros they are what they were.
        inner = torch.stack(block.inners, dim=1).flatten(0, 1)
        best = kernels.likeliest(base_logits.flatten(0, 1), inner, steps.vocab)
        right = choose(*best).view(guessed.shape)
        wrong = right != guessed
        num_drafts = guessed.shape[1]
        first = wrong.int().argmax(dim=1)
        settled = torch.where(wrong.any(dim=1), first + 1, num_drafts)
        todo = (settled < num_drafts).any().int().view(1)
        # Up to the first wrong one, all that was found is dense's.
        rest = self.dense.open(base_logits, steps.prefix, todo)
        known = right, settled
        return walk(steps.only_if(todo), rest, projected, bonus, choose, known)
