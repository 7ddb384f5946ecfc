# SPDX-License-Identifier: Apache-2.0
"""The likeliest of all tokens, for many rows at once, on a CPU.

W2 is taken a part at a time, so that a part's scores are used while they are still in
a cache, and V scores a row are never all there at once.
"""

from typing import NamedTuple

import torch

from vllm_domino.linear import linear

# Values and ids, of any one shape, of the likeliest tokens; of equals the lowest id.
Best = tuple[torch.Tensor, torch.Tensor]

# Tokens of a part, and rows that are scored together: at most 8 MiB of scores in
# bfloat16. Measured at Qwen3-8B's sizes: all of V at once takes three times as long
# with many rows, smaller parts half as long again with few.
_PART = 32768
_ROWS = 128


class _Rows(NamedTuple):
    """Rows to be scored, and the best that was found for each so far."""

    inner: torch.Tensor  # (N, E)
    values: torch.Tensor  # (N,)
    ids: torch.Tensor  # (N,); -1 where nothing was found


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
        guess: Best | None = None,
        tame: bool = False,
    ) -> Best:
        """The likeliest tokens of base + W2 c, value and id, both (B, P).

        Args:
            base: (B, P, V), in any layout whose last dimension is contiguous.
            inner: (B, P, E), c.
            guess: Tokens, and what they score, both (B, P). Good ones save time; what
                is found does not depend on them.
            tame: Whether no score but a guess's can fail to be a number.
        """
        num_reqs, num_positions = inner.shape[:2]
        values = base.new_empty(num_reqs, num_positions)
        ids = values.new_empty(values.shape, dtype=torch.int64)
        step = max(1, _ROWS // num_positions)
        for start in range(0, num_reqs, step):
            some = slice(start, start + step)
            mine = None if guess is None else (guess[0][some], guess[1][some])
            values[some], ids[some] = self._best(base[some], inner[some], mine, tame)
        return values, ids

    def _best(
        self,
        base: torch.Tensor,
        inner: torch.Tensor,
        guess: Best | None,
        tame: bool = False,
    ) -> Best:
        rows = inner.flatten(0, 1)
        # A score enters if it is as high as the guess's, or higher than one that did.
        if guess is None:
            values = rows.new_full((len(rows),), -torch.inf)
            guesses = None
        else:
            values, guesses = guess[0].flatten().clone(), guess[1].flatten()
        ids = torch.full((len(rows),), -1, dtype=torch.int64)
        known = _Rows(rows, values, ids)
        # They only rise.
        tame = tame and bool((values > 0).all())
        for start, part in self._parts:
            scores = part(rows)
            by_request = scores.view(*inner.shape[:2], -1)
            by_request += base[..., start : start + scores.shape[-1]]
            _compare(scores, start, known, guesses, tame)
        missed = (ids < 0).nonzero().squeeze(-1)
        if len(missed):
            # What the guess was said to score is above every score.
            request, position = missed // inner.shape[1], missed % inner.shape[1]
            base, rest = (t[request, position][:, None] for t in (base, inner))
            again = self._best(base, rest, None)
            values[missed], ids[missed] = again[0].flatten(), again[1].flatten()
        return values.view(inner.shape[:2]), ids.view(inner.shape[:2])


def _compare(
    scores: torch.Tensor,
    start: int,
    known: _Rows,
    guesses: torch.Tensor | None,
    tame: bool,
) -> None:
    """Takes in what is best in a part, (N, part) scores of the tokens from ``start``.

    The guesses themselves are left out of the search, so that most often nothing is as
    high as they are, and none has to be looked for.

    Args:
        tame: Whether all scores are numbers and all values above 0.
    """
    if guesses is None:
        guesses = torch.empty(0, dtype=torch.int64)
    inside = (guesses >= start) & (guesses < start + scores.shape[-1])
    places = inside.nonzero().squeeze(-1)
    at = guesses[places] - start
    scored = scores[places, at]
    scores[places, at] = -torch.inf
    # What is not a number is less than nothing, and is looked at.
    candidates = (_highest(scores, tame) < known.values).logical_not_()
    if candidates.any():
        scores[places, at] = scored
        _enter(scores, start, candidates.nonzero().squeeze(-1), known)
    before = known.values[places]
    enters = (scored > before) | ((known.ids[places] < 0) & (scored == before))
    places, scored = places[enters], scored[enters]
    known.values[places], known.ids[places] = scored, guesses[places]


def _highest(scores: torch.Tensor, tame: bool) -> torch.Tensor:
    """Each row's largest score; if ``tame``, or something below 0 where that is."""
    if not tame or scores.dtype != torch.bfloat16:
        return scores.amax(dim=-1)
    # Positive numbers are in the order of their bits, and above the negative ones. Of
    # whole numbers a CPU finds the largest in a quarter of the time.
    return scores.view(torch.int16).amax(dim=-1).view(torch.bfloat16)


def _enter(
    scores: torch.Tensor, start: int, places: torch.Tensor, known: _Rows
) -> None:
    """Takes in these rows' best where it beats what came before it."""
    found, at = scores[places].max(dim=-1)
    before = known.values[places]
    beats = (found <= before).logical_not_() & ~before.isnan()
    enters = (known.ids[places] < 0) | beats
    places = places[enters]
    known.values[places] = found[enters]
    known.ids[places] = at[enters] + start
