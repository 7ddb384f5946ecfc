# SPDX-License-Identifier: Apache-2.0
"""What the kernels must do, on any device: each against its twin in torch.

The tests run these in Triton's interpreter, ``bench/gpu_check.py`` on a GPU. Needs
torch and triton only.
"""

from collections.abc import Callable

import torch

from vllm_domino import kernels

# (H, G, E, V): none a multiple of a block, and all.
ODD, EVEN = (50, 21, 13, 301), (128, 64, 64, 1024)
# Requests, and sizes.
CASES = ((1, ODD), (15, ODD), (17, ODD), (64, ODD), (1, EVEN), (17, EVEN))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Of what is compared, relative to the largest; sums are in another order, and one
# rounding may go the other way.
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


class Numbers:
    """Random numbers on a device, strided as a block's positions are."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        found = torch.randn(shape, generator=self.generator) * scale
        return found.to(self.dtype).to(self.device)

    def row(self, num_reqs: int, width: int) -> torch.Tensor:
        """One position of three: (B, width), with gaps between the rows."""
        return self.normal(num_reqs, 3, width)[:, 1]

    def ids(self, num_reqs: int, below: int) -> torch.Tensor:
        found = torch.randint(below, (num_reqs,), generator=self.generator)
        return found.to(self.device)


def _close(
    found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None
) -> None:
    bound = _TOLERANCE[dtype or expected.dtype] * max(
        1.0, expected.float().abs().max().item()
    )
    apart = (found.float() - expected.float()).abs().max().item()
    assert apart <= bound, f"apart by {apart}, more than {bound}"


def check_advance(numbers: Numbers, num_reqs: int, size: tuple[int, ...]) -> None:
    hidden, gru, _, vocab = size
    given = (
        numbers.ids(num_reqs, vocab),
        torch.tanh(numbers.row(num_reqs, gru)),
        numbers.normal(vocab, hidden),
        numbers.normal(3 * gru, hidden, scale=hidden**-0.5),
        numbers.normal(3 * gru, gru, scale=gru**-0.5),
    )
    _close(kernels.advance(*given), kernels.advance_twin(*given))


def check_bottleneck(numbers: Numbers, num_reqs: int, size: tuple[int, ...]) -> None:
    hidden, gru, width, _ = size
    given = (
        numbers.row(num_reqs, width),
        torch.tanh(numbers.row(num_reqs, gru)),
        # A slice of W1.
        numbers.normal(width, hidden + gru, scale=gru**-0.5)[:, hidden:],
    )
    _close(kernels.bottleneck(*given), kernels.bottleneck_twin(*given))


def check_likeliest(numbers: Numbers, num_reqs: int, size: tuple[int, ...]) -> None:
    """In float32 the twin's token; in fewer bits one that scores as the twin's, to a
    rounding."""
    _, _, width, vocab = size
    base = numbers.row(num_reqs, vocab)
    inner = numbers.normal(num_reqs, width)
    weight = numbers.normal(vocab, width, scale=width**-0.5)
    values, ids = kernels.likeliest(base, inner, weight)
    expected, best = kernels.likeliest_twin(base, inner, weight)
    scores = base + inner @ weight.T
    if base.dtype == torch.float32:
        assert torch.equal(ids, best)
    _close(values, expected, base.dtype)
    _close(scores.gather(-1, ids[:, None])[:, 0], expected, base.dtype)


def check_of_pool(numbers: Numbers, num_reqs: int, size: tuple[int, ...]) -> None:
    """Ties too: the lowest id, in numbers that no rounding changes."""
    _, _, width, vocab = size
    count = vocab // 2 + 1
    pool = torch.stack([torch.randperm(vocab)[:count] for _ in range(num_reqs)])
    pool = pool.sort(dim=-1).values.to(numbers.device)
    base = numbers.row(num_reqs, count).round()
    inner = numbers.normal(num_reqs, width).round().clamp(-2, 2)
    weight = numbers.normal(num_reqs, count, width).round().clamp(-1, 1)
    values, ids = kernels.likeliest_of_pool(base, inner, weight, pool)
    expected, best = kernels.likeliest_of_pool_twin(base, inner, weight, pool)
    assert torch.equal(ids, best), "another token"
    assert torch.equal(values, expected), "another value"


def check_idle(numbers: Numbers, num_reqs: int, size: tuple[int, ...]) -> None:
    """With nothing to do nothing is read: the tokens are no tokens."""
    hidden, gru, width, vocab = size
    state, table = numbers.row(num_reqs, gru), numbers.normal(vocab, hidden)
    nowhere = torch.full((num_reqs,), 2**40, device=numbers.device)
    idle = torch.zeros(1, dtype=torch.int32, device=numbers.device)
    weights = numbers.normal(3 * gru, hidden), numbers.normal(3 * gru, gru)
    kernels.advance(nowhere, state, table, *weights, idle)
    found = [
        kernels.bottleneck(
            numbers.row(num_reqs, width), state, numbers.normal(width, gru), idle
        ),
        kernels.likeliest(
            numbers.row(num_reqs, vocab), None, numbers.normal(vocab, width), idle
        )[0],
    ]
    assert all(len(each) == num_reqs for each in found)


def check_uncorrected(numbers: Numbers, num_reqs: int, size: tuple[int, ...]) -> None:
    _, _, width, vocab = size
    base, weight = numbers.row(num_reqs, vocab), numbers.normal(vocab, width)
    _same(base, None, weight)


def check_ties(numbers: Numbers, num_reqs: int, size: tuple[int, ...]) -> None:
    """Of equals the lowest id, and the two zeros are equal; in numbers that no rounding
    changes."""
    _, _, width, vocab = size
    base = numbers.row(num_reqs, vocab).round()
    inner = numbers.normal(num_reqs, width).round().clamp(-2, 2)
    weight = numbers.normal(vocab, width).round().clamp(-1, 1)
    _same(base, inner, weight)
    zeros = torch.zeros_like(base)
    zeros[:, ::2] = -0.0
    _same(zeros, None, weight)
    _same(zeros, torch.zeros_like(inner), weight)
    _same(zeros - 3, None, weight)


def check_odd_numbers(numbers: Numbers, num_reqs: int, size: tuple[int, ...]) -> None:
    """-inf never wins unless all are; what is not a number always does."""
    _, _, width, vocab = size
    weight = numbers.normal(vocab, width)
    base = numbers.row(num_reqs, vocab)
    base[:, vocab // 3 :] = -torch.inf
    _same(base, None, weight)
    _same(torch.full_like(base, -torch.inf), None, weight)
    base[0, [7, 200]] = torch.inf
    _same(base, None, weight)
    base[-1, [150, 260]] = torch.nan
    _same(base, None, weight)


def _same(base: torch.Tensor, inner: torch.Tensor | None, weight: torch.Tensor) -> None:
    values, ids = kernels.likeliest(base, inner, weight)
    expected, best = kernels.likeliest_twin(base, inner, weight)
    assert torch.equal(ids, best), "another token"
    assert torch.equal(values.nan_to_num(7), expected.nan_to_num(7)), "another value"


Check = Callable[[Numbers, int, tuple[int, ...]], None]
CHECKS: tuple[Check, ...] = (
    check_advance,
    check_bottleneck,
    check_likeliest,
    check_uncorrected,
    check_of_pool,
    check_idle,
    check_ties,
    check_odd_numbers,
)
