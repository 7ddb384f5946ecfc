# SPDX-License-Identifier: Apache-2.0
"""The likeliest of all tokens, for many rows at once, on a CPU.

W2 is taken a part at a time, so that a part's scores are used while they are still in
a core's cache; of V scores a row, nothing but the largest ever leaves it.
"""

import torch

from vllm_domino.linear import linear

# Values and ids, of any one shape, of the likeliest tokens; of equals the lowest id.
Best = tuple[torch.Tensor, torch.Tensor]

# Tokens of a part, and rows that are scored together: 4 MiB of W2 at Qwen3's E of 256
# and 2 MiB of scores in bfloat16, about what a core's second cache holds.
_PART = 8192
_ROWS = 128


class Vocabulary:
    """W2, (V, E), laid out in parts."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._parts = [
            (start, linear(weight[start : start + _PART]))
            for start in range(0, len(weight), _PART)
        ]

    def best(
        self,
        base: torch.Tensor,
        inner: torch.Tensor,
        at_least: torch.Tensor | None = None,
    ) -> Best:
        """The likeliest tokens of base + W2 c, value and id, both (B, P).

        Args:
            base: (B, P, V), in any layout whose last dimension is contiguous.
            inner: (B, P, E), c.
            at_least: (B, P) what the best score comes to, at a guess; a good one saves
                time, and a bad one costs no more than that.
        """
        num_reqs, num_positions = inner.shape[:2]
        values = base.new_empty(num_reqs, num_positions)
        ids = values.new_empty(values.shape, dtype=torch.int64)
        step = max(1, _ROWS // num_positions)
        for start in range(0, num_reqs, step):
            some = slice(start, start + step)
            guess = None if at_least is None else at_least[some]
            values[some], ids[some] = self._best(base[some], inner[some], guess)
        return values, ids

    def _best(
        self, base: torch.Tensor, inner: torch.Tensor, at_least: torch.Tensor | None
    ) -> Best:
        shape, rows = inner.shape[:2], inner.flatten(0, 1)
        # A score enters if it is as high as the guess, or higher than one that did.
        if at_least is None:
            values = rows.new_full((len(rows),), -torch.inf)
        else:
            values = at_least.flatten().clone()
        ids = torch.full((len(rows),), -1, dtype=torch.int64)
        for start, part in self._parts:
            scores = part(rows)
            by_request = scores.view(*shape, -1)
            by_request += base[..., start : start + scores.shape[-1]]
            # What is not a number is less than nothing, and stays.
            candidates = (scores.amax(dim=-1) < values).logical_not_()
            if candidates.any():
                self._enter(scores, start, candidates, values, ids)
        missed = (ids < 0).nonzero().squeeze(-1)
        if len(missed):
            # The guess was above every score.
            request, position = missed // shape[1], missed % shape[1]
            base, inner = (t[request, position][:, None] for t in (base, inner))
            again = self._best(base, inner, None)
            values[missed], ids[missed] = again[0].flatten(), again[1].flatten()
        return values.view(shape), ids.view(shape)

    @staticmethod
    def _enter(
        scores: torch.Tensor,
        start: int,
        candidates: torch.Tensor,
        values: torch.Tensor,
        ids: torch.Tensor,
    ) -> None:
        """Takes in this part's best where it beats what came before it."""
        places = candidates.nonzero().squeeze(-1)
        found, at = scores[places].max(dim=-1)
        before = values[places]
        beats = (found <= before).logical_not_() & ~before.isnan()
        enters = (ids[places] < 0) | beats
        places = places[enters]
        values[places] = found[enters]
        ids[places] = at[enters] + start
