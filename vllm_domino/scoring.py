# SPDX-License-Identifier: Apache-2.0
"""Finding the likeliest token of corrected logits: base + W2 c, for each position of a
block, one after the other.

W2 is the largest thing the head reads, so what matters is how much of it. ``Dense``
reads all of it at every position; ``Exact`` reads a narrow summary of it and the rows
of the tokens that can still win, and picks the same tokens; ``Pool`` reads, once a
block, the rows of the C tokens that the base logits like best, and may pick others.

Shapes: B requests, K drafts, E bottleneck, V vocabulary (of one rank).
"""

from typing import Protocol

import torch
import torch.nn.functional as F

from vllm_domino.config import RuntimeConfig
from vllm_domino.errors import DraftConfigError

# Values and ids, each (B,), of the likeliest tokens; of equals the lowest id.
Best = tuple[torch.Tensor, torch.Tensor]


class Block(Protocol):
    """One block's positions, to be asked in order."""

    def uncorrected(self, position: int) -> Best:
        """The likeliest token of the base logits."""
        ...

    def corrected(self, position: int, inner: torch.Tensor) -> Best:
        """The likeliest token of base + W2 c, for c: (B, E)."""
        ...


class Scorer(Protocol):
    def open(self, base_logits: torch.Tensor, first: int) -> Block:
        """Prepares for a block: (B, K, V), corrected from position ``first`` on."""
        ...


class Dense:
    """Reads all of W2 at every position. Captured in a CUDA graph as it is."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight  # W2: (V, E)

    def open(self, base_logits: torch.Tensor, first: int) -> Block:
        return _DenseBlock(self.weight, base_logits)


class _DenseBlock:
    def __init__(self, weight: torch.Tensor, base_logits: torch.Tensor) -> None:
        self.weight = weight
        self.base_logits = base_logits

    def uncorrected(self, position: int) -> Best:
        return _best(self.base_logits[:, position])

    def corrected(self, position: int, inner: torch.Tensor) -> Best:
        return _best(self.base_logits[:, position] + F.linear(inner, self.weight))


class Exact:
    """Picks what ``Dense`` picks, and reads few of W2's rows.

    The energy of a trained W2 lies in few directions. Turned so that these come first,
    w_v . c is the product of the first r coordinates and a rest that is at most
    |rest of w_v| |rest of c| (Cauchy-Schwarz). So one narrow matrix, the r coordinates
    and two columns of bounds beside them, gives in one product more than every token's
    correction, and a token whose upper bound is less than the score of some other
    token cannot win. What is left is scored as ``Dense`` scores it.

    Rounding: logits are computed in the weights' own type, of unit roundoff u (2**-9
    for bfloat16), as round(base + round(w . c)), with w . c summed in float32. round()
    is monotone. So it is enough that the narrow product, summed in float32 and not yet
    rounded, is no less than Dense's sum: then each upper bound, rounded as the score
    is, is no less than the score. The product lacks: what rounding the coordinates of
    w_v to the type took off, at most e_v |c|, with e_v known; what rounding those of c
    took off, at most u |w_v| |c|; and what both sums err by, at most
    (E + r + 2) 2**-23 |w_v| |c|. The second column is e_v + (2 u + E 2**-20) |w_v|,
    times |c|, which is more than these together; it and the first are enlarged by 8 u
    for their own rounding, as is what they are multiplied by. What is not a number is
    kept, and so are ties: the lowest id wins, as it does densely.

    For a CPU: how much is read depends on data, which a CUDA graph cannot hold.

    Args:
        rank: r, the coordinates that are known.
    """

    # With more survivors than this part of V, reading W2 in one piece is faster.
    _WORTHWHILE = 0.2
    # Below it the squares in a norm vanish; added to what is bounded by norms.
    _TINY = 2.0**-50

    def __init__(self, weight: torch.Tensor, rank: int = 30) -> None:
        width = weight.shape[-1]
        self.weight = weight
        rank = min(rank, width)
        unit = torch.finfo(weight.dtype).eps / 2
        self._enlarged = 1 + 8 * unit
        # Energy lies where the eigenvalues of W2^T W2 are; eigh has them rising.
        exact = weight.float()
        turn = torch.linalg.eigh((exact.T @ exact).double())[1].flip(-1).float()
        self.turn = turn  # (E, E)
        turned = exact @ turn
        known = turned[:, :rank].to(weight.dtype)
        lost = (turned[:, :rank] - known.float()).norm(dim=-1)
        norms = exact.norm(dim=-1) + self._TINY
        rest = turned[:, rank:].norm(dim=-1) + width * 2**-22 * norms
        slack = lost + (2 * unit + width * 2**-20) * norms
        bounds = torch.stack([rest, slack], dim=-1) * self._enlarged
        # (V, r + 2)
        self.narrow = torch.cat([known, bounds.to(weight.dtype)], dim=-1).contiguous()
        self.rank = rank

    def open(self, base_logits: torch.Tensor, first: int) -> Block:
        return _ExactBlock(self, base_logits)

    def bounds(self, inner: torch.Tensor) -> torch.Tensor:
        """More than each token's correction, or as much: (B, E) -> (B, V)."""
        turned = inner.float() @ self.turn
        rest = turned[:, self.rank :].norm(dim=-1, keepdim=True)
        whole = turned.norm(dim=-1, keepdim=True)
        lengths = (torch.cat([rest, whole], dim=-1) + self._TINY) * self._enlarged
        known = torch.cat([turned[:, : self.rank], lengths], dim=-1)
        return F.linear(known.to(self.narrow.dtype), self.narrow)

    def survivors(self, base: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        """Ids of all tokens that may win for some request, rising."""
        upper = base + self.bounds(inner)
        # Any token will do for comparison; this one scores high. max, not argmax, which
        # is several times slower on a CPU in bfloat16.
        favourite = upper.max(dim=-1).indices
        row = self.weight[favourite]
        correction = F.linear(inner, row).diagonal()
        score = base.gather(-1, favourite[:, None]) + correction[:, None]
        # Not "at least": what is not a number must stay.
        stays = (upper < score).logical_not_()
        stays = stays[0] if len(stays) == 1 else stays.any(dim=0)
        return stays.nonzero().squeeze(-1)


class _ExactBlock(_DenseBlock):
    def __init__(self, scorer: Exact, base_logits: torch.Tensor) -> None:
        super().__init__(scorer.weight, base_logits)
        self.scorer = scorer

    def corrected(self, position: int, inner: torch.Tensor) -> Best:
        base = self.base_logits[:, position]
        ids = self.scorer.survivors(base, inner)
        if len(ids) > self.scorer._WORTHWHILE * len(self.weight):
            return super().corrected(position, inner)
        values, places = _best(base[:, ids] + F.linear(inner, self.weight[ids]))
        return values, ids[places]


def make_scorer(
    runtime: RuntimeConfig, weight: torch.Tensor, captured: bool
) -> "Scorer":
    """The scorer that a user's choice means.

    Args:
        weight: W2, (V, E).
        captured: Whether the draft step goes into a CUDA graph.
    """
    if runtime.head == "pool":
        return Pool(weight, runtime.pool_size)
    if runtime.head == "dense":
        return Dense(weight)
    if weight.device.type != "cpu" or captured:
        raise DraftConfigError(
            'speculative_config.head is "exact", but how much it reads depends on '
            "data, which the captured draft step of this device and runner cannot. "
            'Set it to "dense", or leave it out.'
        )
    return Exact(weight)


class Pool:
    """Considers only the C tokens with the largest base logit anywhere in a request's
    block, as SGLang does. Approximate: the winner may be another."""

    def __init__(self, weight: torch.Tensor, size: int) -> None:
        self.weight = weight
        self.size = min(size, len(weight))

    def open(self, base_logits: torch.Tensor, first: int) -> Block:
        if first >= base_logits.shape[1]:
            return _DenseBlock(self.weight, base_logits)
        peaks = base_logits[:, first:].amax(dim=1)
        pool = peaks.topk(self.size, dim=-1, sorted=False).indices
        # Rising, so that of equals the lowest id wins.
        pool = pool.sort(dim=-1).values
        return _PoolBlock(base_logits, self.weight[pool], pool)


class _PoolBlock(_DenseBlock):
    def __init__(
        self, base_logits: torch.Tensor, weight: torch.Tensor, pool: torch.Tensor
    ) -> None:
        super().__init__(weight, base_logits)  # the pool's rows: (B, C, E)
        self.pool = pool  # (B, C)

    def corrected(self, position: int, inner: torch.Tensor) -> Best:
        base = self.base_logits[:, position].gather(-1, self.pool)
        delta = torch.bmm(self.weight, inner[:, :, None]).squeeze(-1)
        values, places = _best(base + delta)
        return values, self.pool.gather(-1, places[:, None]).squeeze(-1)


def _best(logits: torch.Tensor) -> Best:
    values, ids = logits.max(dim=-1)
    return values, ids
