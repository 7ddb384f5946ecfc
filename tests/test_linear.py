# SPDX-License-Identifier: Apache-2.0
"""A weight that is laid out gives the bits of one that is not, whatever the batch."""

import pytest
import torch
import torch.nn.functional as F

from vllm_domino import linear as module
from vllm_domino.linear import linear

# As large as is laid out, and of a bottleneck's width.
OUT, IN = 9001, 256


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(OUT, IN) / 16).bfloat16()


@pytest.mark.parametrize("rows", [1, 2, 7, 15, 64, 120, 960])
def test_laid_out_it_gives_the_same_bits(rows: int, weight: torch.Tensor) -> None:
    assert module._can_be_laid_out(weight)
    x = torch.randn(rows, IN).bfloat16()
    assert torch.equal(linear(weight)(x), F.linear(x, weight))


@pytest.mark.parametrize("start", [0, 13, 8192])
def test_many_rows_and_parts_are_summed_as_one_is(
    start: int, weight: torch.Tensor
) -> None:
    """What lets ``Exact`` check many positions at once."""
    x = torch.randn(60, IN).bfloat16()
    one_by_one = torch.cat([F.linear(row[None], weight) for row in x])
    part = weight[start : start + 8192]
    assert torch.equal(linear(part)(x), one_by_one[:, start : start + 8192])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_are_used_as_they_lie(dtype: torch.dtype) -> None:
    weight, x = torch.randn(2000, 512).to(dtype), torch.randn(3, 512).to(dtype)
    assert not module._can_be_laid_out(weight)
    assert torch.equal(linear(weight)(x), F.linear(x, weight))


def test_a_slice_of_a_matrix() -> None:
    weight, x = torch.randn(40, 30).bfloat16(), torch.randn(2, 5, 10).bfloat16()
    assert torch.equal(linear(weight[:, 10:20])(x), F.linear(x, weight[:, 10:20]))
