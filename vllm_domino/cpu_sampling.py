# SPDX-License-Identifier: Apache-2.0
"""Two functions of vLLM's rejection sampler that its CPU path gets wrong, made right.

``apply_top_k_top_p`` is also called for a step in which no request had drafts, such as
one that only reads prompts, and with top-k alone it then takes the maximum of nothing:
the engine dies.

``expand_batch_to_tokens`` gives every draft token its request's temperature, top-p or
top-k. On a CPU, vLLM 0.32 and 0.33 have a kernel write it into an int64 copy of the
output, which is then dropped: the sampler reads uninitialised memory, and sampled text
is not the target's. Nothing errors, and greedy output, which needs none, is right.
"""

from collections.abc import Callable
from functools import wraps

import torch

Expand = Callable[[torch.Tensor, torch.Tensor, int, int, int], torch.Tensor]
# (logits, k, p) -> logits with what top-k and top-p exclude at -inf.
Filter = Callable[
    [torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor
]


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """One value a request to one a token.

    Args:
        x: (B,) a value for each request.
        cu_num_tokens: (B,) how many tokens there are up to and with each request.
        num_tokens: How many there are in all.
        replace_from: A value of ``x`` that stands for another,
        replace_to: and which.

    Returns:
        (num_tokens,) of ``x``'s dtype: [a, b, c] with [2, 5, 6] is [a, a, b, b, b, c].
    """
    values = torch.where(x == replace_from, replace_to, x).to(x.dtype)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return values.repeat_interleave(counts.long(), output_size=num_tokens)


def skipping_no_tokens(apply: Filter) -> Filter:
    """The same function, but for no rows, which it returns as they are."""

    @wraps(apply)
    def apply_top_k_top_p(
        logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
    ) -> torch.Tensor:
        return logits if logits.shape[0] == 0 else apply(logits, k, p)

    return apply_top_k_top_p


def takes_no_tokens(apply: Filter) -> bool:
    """Whether a version of the function bears a step without drafts."""
    try:
        apply(torch.empty(0, 4), torch.empty(0, dtype=torch.int32), None)
    except (RuntimeError, IndexError):
        return False
    return True


def is_right(expand: Expand) -> bool:
    """Whether a version of the function does its work: tried, not told by a version."""
    x = torch.tensor([0.25, 0.0, 1.5])
    counts = torch.tensor([2, 3, 5], dtype=torch.int32)
    expected = torch.tensor([0.25, 0.25, 1.0, 1.5, 1.5])
    return bool(torch.equal(expand(x, counts, 5, 0, 1), expected))
