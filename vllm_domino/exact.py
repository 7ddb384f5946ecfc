# SPDX-License-Identifier: Apache-2.0
"""``dense``'s tokens at about a pool's price: a block is guessed, then checked.

Shapes: B requests, K drafts, G GRU, E bottleneck, V vocabulary (of one rank).
"""

from dataclasses import dataclass

import torch

from vllm_domino.rollouts import Choose
from vllm_domino.scoring import Pool, PoolBlock, promise_of
from vllm_domino.steps import Foreseen, State, Steps
from vllm_domino.vocabulary import Best, Vocabulary

# Guesses that may be wrong before a block is finished without.
_ROUNDS = 3
# Far below what bfloat16 holds, and above any correction there is.
_HUGE = 1e30
# Rows of a product that take little longer than one, the weights being what is read.
_ROWS = 64


def foresees(num_reqs: int, num_drafts: int) -> bool:
    """Whether likely tokens are few enough to look up several a position."""
    return 2 * num_reqs * num_drafts <= _ROWS


@dataclass
class _Blocks:
    """Blocks of some requests, and their drafts as far as they are known."""

    projected: torch.Tensor  # (B, K, E)
    pool: PoolBlock
    drafts: torch.Tensor  # (B, K)
    foreseen: Foreseen | None

    def of(self, requests: torch.Tensor) -> "_Blocks":
        if len(requests) == len(self.drafts):
            return self  # all of them: nothing to copy
        return _Blocks(
            self.projected[requests],
            self.pool.of(requests),
            self.drafts[requests],
            None if self.foreseen is None else self.foreseen.of(requests),
        )


class Exact:
    """Guesses a block from a pool, then checks all of its positions at once.

    Step by step, W2 is read once a position. But the guess gives every position's c, so
    one product gives every position's likeliest token of the whole vocabulary, with W2
    read once. As far as these are the tokens that were guessed, they are dense's:

    Let d_i be dense's tokens, g_i the guessed ones, and t_i the likeliest of
    base_i + W2 c(g_1 .. g_{i-1}) over the whole vocabulary. If g_j = d_j for all j < i,
    then t_i is what dense computes at i, so t_i = d_i; if also t_i = g_i, the same
    holds at i + 1. So up to the first i with t_i != g_i all guesses are dense's, and
    t_i is dense's there. From it on the block is guessed again, and checked again; each
    round settles at least one position more. Were ``_ROUNDS`` guesses wrong, the rest
    is scored over the whole vocabulary, position by position.

    No bound is needed, so there is none to be rounded: t_i is found among the same
    scores, round(base + round(w . c)), by comparison alone, and of equals the lowest id
    wins. The one thing that may differ from ``Dense`` is the order in which a product
    over E sums, if the machine's library sums one row otherwise than many. oneDNN's
    bfloat16 kernels do not (tests/test_linear.py).

    For a CPU: whether to go on depends on data, which a CUDA graph cannot hold; there,
    ``vllm_domino.fused.FusedExact`` does the same.

    Args:
        size: Tokens to guess from: those with the largest base logits in a block.
        foresees: Whether likely tokens' embeddings are looked up ahead. Not where ranks
            share the table: they must look up the same tokens at the same time.
    """

    def __init__(self, steps: Steps, size: int, foresees: bool = True) -> None:
        self.steps = steps
        self.foresees = foresees
        self.guesses = Pool(steps.vocab, size)
        self.vocabulary = Vocabulary(steps.vocab)
        self.promise = promise_of(steps.vocab)
        self.largest = steps.vocab.float().norm(dim=-1).max()

    def draft(
        self,
        hidden: torch.Tensor,
        base_logits: torch.Tensor,
        bonus: torch.Tensor,
        choose: Choose,
    ) -> torch.Tensor:
        """See ``vllm_domino.rollouts.Rollout``."""
        steps = self.steps
        drafts = bonus.new_empty(hidden.shape[:2], dtype=torch.int64)
        first = min(steps.prefix, drafts.shape[1])
        if first:
            # Uncorrected drafts need no guess.
            values, ids = base_logits[:, :first].max(dim=-1)
            drafts[:, :first] = choose(values.flatten(), ids.flatten()).view(-1, first)
        if first == drafts.shape[1]:
            return drafts
        projected = steps.project_hidden(hidden)
        pool = self.guesses.open_for(projected, base_logits, first, self.promise)
        foreseen = self._foresee(pool, bonus)
        blocks = _Blocks(projected, pool, drafts, foreseen)
        gates = None if foreseen is None else foreseen.look_up(0, bonus)
        state = steps.start(bonus, gates)
        for i in range(first):
            state = self._advance(blocks, i, state)
        self._settle(blocks, first, None, state, choose, _ROUNDS)
        return drafts

    def _foresee(self, pool: PoolBlock, bonus: torch.Tensor) -> Foreseen | None:
        """The bonus token, and the likeliest of every position before correction; few,
        or none."""
        num_reqs, num_drafts, size = pool.logits.shape
        if not self.foresees or not foresees(num_reqs, num_drafts):
            return None
        count = min(size, _ROWS // (num_reqs * num_drafts))
        places = pool.logits.topk(count, dim=-1, sorted=False).indices
        tokens = pool.pool[:, None].expand(-1, num_drafts, -1).gather(2, places)
        return self.steps.foresee(bonus, tokens)

    def _settle(
        self,
        blocks: _Blocks,
        start: int,
        settled: torch.Tensor | None,
        state: State,
        choose: Choose,
        rounds: int,
    ) -> None:
        """Makes of ``blocks.drafts``, from ``start`` on, what dense would.

        Args:
            settled: (B,) the position from which a request's drafts are not yet known
                to be right; ``start`` if None.
            state: The GRU's, at ``start``.
            rounds: How many guesses may be made.
        """
        steps, drafts = self.steps, blocks.drafts
        states, inners, guesses = [], [], []
        for i in range(start, drafts.shape[1]):
            states.append(state)
            inners.append(steps.bottleneck(blocks.projected[:, i], state))
            guesses.append(self._guess(blocks, i, inners[-1], rounds))
            token = choose(*guesses[-1])
            if settled is None:
                drafts[:, i] = token
            else:
                drafts[:, i] = torch.where(settled > i, drafts[:, i], token)
            if i + 1 < drafts.shape[1]:
                state = self._advance(blocks, i, state)
        if not rounds:
            return
        inner = torch.stack(inners, dim=1)
        values, ids = (torch.stack(each, dim=1) for each in zip(*guesses, strict=True))
        base, tame = blocks.pool.base_logits[:, start:], self._is_tame(inner)
        values, ids = self.vocabulary.best(base, inner, (values, ids), tame)
        right = choose(values.flatten(), ids.flatten()).view(len(drafts), -1)
        wrong = right != drafts[:, start:]
        if not wrong.any():
            return
        requests = wrong.any(dim=1).nonzero().squeeze(-1)
        first = wrong[requests].int().argmax(dim=1)
        drafts[requests, start + first] = right[requests, first]
        self._go_on(blocks, start, requests, first, states, choose, rounds - 1)

    def _is_tame(self, inner: torch.Tensor) -> bool:
        """Whether no score but a guessed one can fail to be a number: what is none
        among the base logits and in W2 comes first in the pool, so a correction would
        have to be infinite."""
        largest = inner.float().norm(dim=-1).max() * self.largest
        return bool(largest < _HUGE)

    def _guess(
        self, blocks: _Blocks, position: int, inner: torch.Tensor, rounds: int
    ) -> Best:
        if rounds:
            return blocks.pool.best(position, inner)
        base = blocks.pool.base_logits[:, position : position + 1]
        values, ids = self.vocabulary.best(base, inner[:, None])
        return values.squeeze(1), ids.squeeze(1)

    def _advance(self, blocks: _Blocks, position: int, state: State) -> State:
        """The state after the draft at a position."""
        token = blocks.drafts[:, position]
        gates = None
        if blocks.foreseen is not None:
            gates = blocks.foreseen.look_up(1 + position, token)
        return self.steps.advance(token, state, gates)

    def _go_on(
        self,
        blocks: _Blocks,
        start: int,
        requests: torch.Tensor,
        first: torch.Tensor,
        states: list[State],
        choose: Choose,
        rounds: int,
    ) -> None:
        """Settles what comes after the first wrong guess of some requests."""
        unfinished = start + first + 1 < blocks.drafts.shape[1]
        requests, first = requests[unfinished], first[unfinished]
        if not len(requests):
            return
        again = int(first.min())
        some = blocks.of(requests)
        state = self._advance(some, start + again, states[again].of(requests))
        self._settle(some, start + again + 1, start + first + 1, state, choose, rounds)
        if some is not blocks:
            blocks.drafts[requests] = some.drafts
