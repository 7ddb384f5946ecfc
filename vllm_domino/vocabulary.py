# SPDX-License-Identifier: Apache-2.0
"""The likeliest of all tokens, for many rows at once, on a CPU.

W2 is taken a part at a time, so that a part's scores are used while they are still in
a cache, and V scores a row are never all there at once.
"""

import torch

from vllm_domino.linear import linear

# Values and ids, of any one shape, of the likeliest tokens; of equals the lowest id.
Best = tuple[torch.Tensor, torch.Tensor]

# Tokens of a part, and rows that are scored together: at most 8 MiB of scores in
# bfloat16. Measured at Qwen3-8B's sizes: all of V at once takes three times as long
# with many rows, smaller parts half as long again with few.
_PART = 32768
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
        shape, rows = inner.shape[:2], inner.flatten(0, 1)
        # A score enters if it is as high as the guess's, or higher than one that did.
        if guess is None:
            values = rows.new_full((len(rows),), -torch.inf)
            guesses = torch.empty(0, dtype=torch.int64)
        else:
            values, guesses = guess[0].flatten().clone(), guess[1].flatten()
        ids = torch.full((len(rows),), -1, dtype=torch.int64)
        # They only rise.
        tame = tame and bool((values > 0).all())
        for start, part in self._parts:
            scores = part(rows)
            by_request = scores.view(*shape, -1)
            by_request += base[..., start : start + scores.shape[-1]]
            _compare(scores, start, (values, ids), guesses, tame)
        missed = (ids < 0).nonzero().squeeze(-1)
        if len(missed):
            # What the guess was said to score is above every score.
            request, position = missed // shape[1], missed % shape[1]
            base, rest = (t[request, position][:, None] for t in (base, inner))
            again = self._best(base, rest, None)
            values[missed], ids[missed] = again[0].flatten(), again[1].flatten()
        return values.view(shape), ids.view(shape)


def _compare(
    scores: torch.Tensor,
    start: int,
    known: Best,
    guesses: torch.Tensor,
    tame: bool,
) -> None:
    """Takes in what is best in a part, (N, part) scores of the tokens from ``start``.

    The guesses themselves are left out of the search, so that most often nothing is as
    high as they are, and none has to be looked for.

    Args:
        known: (N,) the best values and ids so far; the id -1 where there is none.
        guesses: (N,) ids, or none.
        tame: Whether all scores are numbers and all values above 0.
    """
    values, ids = known
    inside = (guesses >= start) & (guesses < start + scores.shape[-1])
    places = inside.nonzero().squeeze(-1)
    at = guesses[places] - start
    scored = scores[places, at]
    scores[places, at] = -torch.inf
    # What is not a number is less than nothing, and is looked at.
    candidates = (_highest(scores, tame) < values).logical_not_()
    if candidates.any():
        scores[places, at] = scored
        _enter(scores, start, candidates.nonzero().squeeze(-1), known)
    before = values[places]
    enters = (scored > before) | ((ids[places] < 0) & (scored == before))
    places, scored = places[enters], scored[enters]
    values[places], ids[places] = scored, guesses[places]


def _highest(scores: torch.Tensor, tame: bool) -> torch.Tensor:
    """Each row's largest score; if ``tame``, or something below 0 where that is."""
    if not tame or scores.dtype != torch.bfloat16:
        return scores.amax(dim=-1)
    # Positive numbers are in the order of their bits, and above the negative ones. Of
    # whole numbers a CPU finds the largest in a quarter of the time.
    return scores.view(torch.int16).amax(dim=-1).view(torch.bfloat16)


def _enter(scores: torch.Tensor, start: int, places: torch.Tensor, known: Best) -> None:
    """Takes in these rows' best where it beats what came before it."""
    values, ids = known
    found, at = scores[places].max(dim=-1)
    before = values[places]
    beats = (found <= before).logical_not_() & ~before.isnan()
    enters = (ids[places] < 0) | beats
    places = places[enters]
    values[places] = found[enters]
    ids[places] = at[enters] + start
