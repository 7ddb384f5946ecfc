# SPDX-License-Identifier: Apache-2.0
"""The likeliest token of corrected logits, base + W2 c, position by position.

Shapes: B requests, K drafts, E bottleneck, V vocabulary (of one rank), C pool.
"""

from typing import Protocol

import torch
import torch.nn.functional as F

from vllm_domino.vocabulary import Best

# SGLang's pool; and what is enough to guess from, a wrong guess being found out.
POOL, GUESSES = 2048, 512


class Block(Protocol):
    """The positions of B blocks."""

    def best(self, position: int, inner: torch.Tensor | None) -> Best:
        """The likeliest token of base + W2 c, for c: (B, E), value and id, each (B,);
        of the base logits, which stay uncorrected, if there is no c."""
        ...


class Scorer(Protocol):
    def open(self, base_logits: torch.Tensor, first: int) -> Block:
        """Prepares for blocks: (B, K, V), corrected from position ``first`` on."""
        ...


class Dense:
    """Scores every token. Fixed shapes, so a CUDA graph can hold it."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight  # W2: (V, E)

    def open(self, base_logits: torch.Tensor, first: int) -> Block:
        return _DenseBlock(self.weight, base_logits)


class _DenseBlock:
    def __init__(self, weight: torch.Tensor, base_logits: torch.Tensor) -> None:
        self.weight = weight
        self.base_logits = base_logits.unbind(1)

    def best(self, position: int, inner: torch.Tensor | None) -> Best:
        logits = self.base_logits[position]
        if inner is not None:
            logits = logits + F.linear(inner, self.weight)
        return _best(logits)


class Pool:
    """Scores the C tokens with the largest base logit anywhere in a request's block, as
    SGLang does. Fixed shapes too. Approximate: the likeliest may be another."""

    def __init__(self, weight: torch.Tensor, size: int) -> None:
        self.weight = weight
        self.size = min(size, len(weight))

    def open(
        self,
        base_logits: torch.Tensor,
        first: int,
        promise: torch.Tensor | None = None,
    ) -> "PoolBlock":
        """As ``Scorer`` says.

        Args:
            promise: (B, V) what is added to a token's largest base logit to compare it
                with others'.
        """
        # Where nothing is corrected the pool is not asked, but must be something.
        first = min(first, base_logits.shape[1] - 1)
        peaks = base_logits[:, first:].amax(dim=1)
        pool = _largest(peaks if promise is None else peaks + promise, self.size)
        # Rising, so that of equals the lowest id wins.
        pool = pool.sort(dim=-1).values
        positions = base_logits.shape[1]
        logits = base_logits.gather(2, pool[:, None].expand(-1, positions, -1))
        return PoolBlock(base_logits, logits, self.weight[pool], pool)

    def open_for(
        self,
        projected: torch.Tensor,
        base_logits: torch.Tensor,
        first: int,
        promise: torch.Tensor,
    ) -> "PoolBlock":
        """A pool that is likely to have every position's winner.

        Args:
            projected: (B, K, E) the part of c's argument that is known.
            promise: (V,) see ``promise_of``.
        """
        # As long as c may be; of its two parts only that of z is known yet.
        known = projected[:, min(first, projected.shape[1] - 1) :]
        length = F.silu(known).float().norm(dim=-1).amax(dim=1)
        added = torch.outer(length, promise).to(base_logits.dtype)
        return self.open(base_logits, first, added)


# A correction w . c of a c like any other has the standard deviation |w| |c| / sqrt(E).
# Tokens are guessed from by the base logit and so many of these.
_DEVIATIONS = 3


def promise_of(weight: torch.Tensor) -> torch.Tensor:
    """What a token's correction may well come to, by |c|: (V, E) -> (V,)."""
    deviations = _DEVIATIONS / weight.shape[-1] ** 0.5
    return weight.float().norm(dim=-1) * deviations


class PoolBlock:
    def __init__(
        self,
        base_logits: torch.Tensor,
        logits: torch.Tensor,
        weight: torch.Tensor,
        pool: torch.Tensor,
    ) -> None:
        self.base_logits = base_logits
        self.logits = logits  # the pool's: (B, K, C)
        self.weight = weight  # the pool's: (B, C, E)
        self.pool = pool  # (B, C)

    def of(self, requests: torch.Tensor) -> "PoolBlock":
        """These requests' blocks."""
        mine = (self.base_logits, self.logits, self.weight, self.pool)
        return PoolBlock(*(tensor[requests] for tensor in mine))

    def best(self, position: int, inner: torch.Tensor | None) -> Best:
        if inner is None:
            return _best(self.base_logits[:, position])
        delta = torch.bmm(self.weight, inner[:, :, None]).squeeze(-1)
        values, places = _best(self.logits[:, position] + delta)
        return values, self.pool.gather(-1, places[:, None]).squeeze(-1)


# The vocabulary is cut into that many slices, and compared slice against slice first.
_SLICES = 16


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of each row's ``count`` largest values: (B, V) -> (B, count).

    They lie in the ``count`` columns of slices (ids that are equal modulo the slice's
    length) that have the largest maxima, so most of V need not be sorted.
    """
    length = -(-values.shape[-1] // _SLICES)
    if count >= length:
        return values.topk(count, dim=-1, sorted=False).indices
    padding = length * _SLICES - values.shape[-1]
    slices = F.pad(values, (0, padding), value=-torch.inf).unflatten(-1, (-1, length))
    columns = slices.amax(dim=1).topk(count, dim=-1, sorted=False).indices
    inside = slices.gather(2, columns[:, None].expand(-1, _SLICES, -1)).flatten(1)
    best = inside.topk(count, dim=-1, sorted=False).indices
    return columns.gather(1, best % count) + best // count * length


def _best(logits: torch.Tensor) -> Best:
    values, ids = logits.max(dim=-1)
    return values, ids
