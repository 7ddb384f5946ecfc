# SPDX-License-Identifier: Apache-2.0
"""The likeliest of all tokens, found part by part, is the one of a whole product."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_domino import vocabulary as module
from vllm_domino.vocabulary import Best, Vocabulary

DTYPES = [torch.float32, torch.bfloat16]


class Block(NamedTuple):
    """Base logits (B, P, V), W2 (V, E), and c at each position (P, B, E)."""

    base: torch.Tensor
    weight: torch.Tensor
    inner: torch.Tensor

    def to(self, dtype: torch.dtype) -> "Block":
        return Block(*(tensor.to(dtype) for tensor in self))

    def scores(self) -> torch.Tensor:
        """(B, P, V), as they are computed position by position."""
        steps = [
            self.base[:, i] + F.linear(inner, self.weight)
            for i, inner in enumerate(self.inner)
        ]
        return torch.stack(steps, dim=1)

    def best(self, guess: Best | None = None) -> torch.Tensor:
        inner = self.inner.transpose(0, 1).contiguous()
        ids: torch.Tensor
        _, ids = Vocabulary(self.weight).best(self.base, inner, guess)
        return ids


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small vocabulary has many, the last one cut."""
    monkeypatch.setattr(module, "_PART", 640)
    monkeypatch.setattr(module, "_ROWS", 6)


# --- Numbers made to break it ---

Make = Callable[[torch.Generator], Block]
VOCAB, WIDTH, DRAFTS = 3001, 16, 4


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def all_equal(generator: torch.Generator) -> Block:
    base = torch.full((2, DRAFTS, VOCAB), 1.5)
    return Block(base, torch.zeros(VOCAB, WIDTH), torch.ones(DRAFTS, 2, WIDTH))


def equal_but_for_the_correction(generator: torch.Generator) -> Block:
    base = torch.zeros(2, DRAFTS, VOCAB)
    return Block(
        base, _normal(generator, VOCAB, WIDTH), _normal(generator, DRAFTS, 2, WIDTH)
    )


def huge_corrections(generator: torch.Generator) -> Block:
    return Block(
        _normal(generator, 2, DRAFTS, VOCAB),
        _normal(generator, VOCAB, WIDTH) * 1e4,
        _normal(generator, DRAFTS, 2, WIDTH) * 1e4,
    )


def one_hot_rows(generator: torch.Generator) -> Block:
    weight = torch.zeros(VOCAB, WIDTH)
    weight[torch.arange(VOCAB), torch.arange(VOCAB) % WIDTH] = 8.0
    inner = torch.zeros(DRAFTS, 2, WIDTH)
    inner[torch.arange(DRAFTS), :, torch.arange(DRAFTS)] = 1.0
    return Block(_normal(generator, 2, DRAFTS, VOCAB) * 4, weight, inner)


def denormals(generator: torch.Generator) -> Block:
    return Block(
        _normal(generator, 2, DRAFTS, VOCAB) * 1e-39,
        _normal(generator, VOCAB, WIDTH) * 1e-39,
        _normal(generator, DRAFTS, 2, WIDTH),
    )


def one_token_at_the_bound(generator: torch.Generator) -> Block:
    """Rows along c: |w . c| is |w| |c|, and only rounding decides."""
    inner = _normal(generator, 1, 1, WIDTH).expand(DRAFTS, 2, WIDTH).contiguous()
    along = inner[0, 0] / inner[0, 0].norm()
    length = torch.rand(VOCAB, generator=generator)
    weight = along * length[:, None]
    # All but a few sum to the same, to within rounding.
    base = 10 - length * inner[0, 0].norm()
    return Block(base.expand(2, DRAFTS, VOCAB).contiguous(), weight, inner)


def rows_against_c(generator: torch.Generator) -> Block:
    block = one_token_at_the_bound(generator)
    return Block(block.base, -block.weight, block.inner)


def ties(generator: torch.Generator) -> Block:
    base = _normal(generator, 2, DRAFTS, VOCAB).round()
    weight = _normal(generator, VOCAB, WIDTH).round() / 4
    return Block(base, weight, _normal(generator, DRAFTS, 2, WIDTH).round())


def padded(generator: torch.Generator) -> Block:
    block = equal_but_for_the_correction(generator)
    block.base[..., -1000:] = -torch.inf
    return block


def all_but_one_out(generator: torch.Generator) -> Block:
    block = equal_but_for_the_correction(generator)
    block.base[...] = -torch.inf
    block.base[..., 77] = -3.0
    return block


def infinite(generator: torch.Generator) -> Block:
    block = equal_but_for_the_correction(generator)
    block.base[:, 1, 500] = torch.inf
    return block


def not_a_number(generator: torch.Generator) -> Block:
    block = equal_but_for_the_correction(generator)
    block.base[0, 1, 500] = torch.nan
    return block


def a_c_that_is_not_a_number(generator: torch.Generator) -> Block:
    block = equal_but_for_the_correction(generator)
    block.inner[2, 1, 3] = torch.nan
    return block


def one_request_unlike_the_other(generator: torch.Generator) -> Block:
    block = equal_but_for_the_correction(generator)
    block.base[0] = _normal(generator, DRAFTS, VOCAB) * 50
    block.inner[:, 1] *= 100
    return block


MAKERS: list[Make] = [
    all_equal,
    equal_but_for_the_correction,
    huge_corrections,
    one_hot_rows,
    denormals,
    one_token_at_the_bound,
    rows_against_c,
    ties,
    padded,
    all_but_one_out,
    infinite,
    not_a_number,
    a_c_that_is_not_a_number,
    one_request_unlike_the_other,
]


def right(found: torch.Tensor, block: Block) -> bool:
    """Whether these tokens are the likeliest: in bfloat16 the lowest id of equals. In
    float32 a library may sum many rows otherwise than one, so there they may score a
    rounding less."""
    scores = block.scores()
    expected = scores.max(dim=-1)
    if scores.dtype == torch.bfloat16:
        return bool(torch.equal(found, expected.indices))
    values = scores.gather(-1, found[..., None]).squeeze(-1)
    same = found == expected.indices
    length = block.inner.norm(dim=-1).T * block.weight.norm(dim=-1).max()
    near = values >= expected.values - 1e-6 * (length + expected.values.abs())
    return bool((same | near).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", MAKERS)
def test_never_a_wrong_token(make: Make, dtype: torch.dtype) -> None:
    for seed in range(5):
        block = make(torch.Generator().manual_seed(seed)).to(dtype)
        assert right(block.best(), block)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("token", ["best", "last of equals", 0, 639, 640, 3000])
@pytest.mark.parametrize("said", ["right", "too high", "too low", "NaN", "-inf"])
def test_whatever_is_guessed(
    make: Make, token: str | int, said: str, dtype: torch.dtype
) -> None:
    """A right token or not, and its score told right or not."""
    block = make(torch.Generator().manual_seed(9)).to(dtype)
    scores = block.scores()
    best, ids = scores.max(dim=-1)
    if token == "last of equals":
        ids = scores.shape[-1] - 1 - scores.flip(-1).max(dim=-1).indices
    elif isinstance(token, int):
        ids = torch.full_like(ids, token)
    score = scores.gather(-1, ids[..., None]).squeeze(-1)
    values = {
        "right": score,
        "too high": best + 1,
        "too low": score - 1,
        "NaN": torch.full_like(score, torch.nan),
        "-inf": torch.full_like(score, -torch.inf),
    }[said]
    assert right(block.best((values, ids)), block)


@pytest.mark.parametrize("lift", [-100.0, -10.0, -1.0, 0.0, 10.0])
@pytest.mark.parametrize("token", ["best", 0, 2000])
def test_what_is_known_to_be_numbers(token: str | int, lift: float) -> None:
    """Found by its bits, above 0 and below."""
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        block = equal_but_for_the_correction(generator).to(torch.bfloat16)
        block.base.add_(lift)[..., 5:900] = -torch.inf
        scores = block.scores()
        best, ids = scores.max(dim=-1)
        if isinstance(token, int):
            ids = torch.full_like(ids, token)
        guess = scores.gather(-1, ids[..., None]).squeeze(-1), ids
        inner = block.inner.transpose(0, 1).contiguous()
        found = Vocabulary(block.weight).best(block.base, inner, guess, tame=True)
        assert torch.equal(found[1], scores.max(dim=-1).indices)
        assert torch.equal(found[0], best)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_reqs=st.integers(1, 9),
    base_scale=st.floats(0, 100),
    weight_scale=st.floats(1e-6, 100),
    grid=st.sampled_from([0.0, 0.25, 1.0]),
    dtype=st.sampled_from(DTYPES),
)
def test_never_a_wrong_token_whatever_the_scales(
    seed: int,
    num_reqs: int,
    base_scale: float,
    weight_scale: float,
    grid: float,
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    base = _normal(generator, num_reqs, 3, 997) * base_scale
    weight = _normal(generator, 997, 12) * weight_scale
    inner = _normal(generator, 3, num_reqs, 12)
    if grid:
        # On a grid ties abound.
        base, inner = (base / grid).round() * grid, inner.round()
    block = Block(base, weight, inner).to(dtype)
    assert right(block.best(), block)


def test_a_vocabulary_in_laid_out_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PART", 8192)
    generator = torch.Generator().manual_seed(3)
    block = Block(
        _normal(generator, 2, 5, 20_011) * 3,
        _normal(generator, 20_011, 256) / 8,
        _normal(generator, 5, 2, 256),
    ).to(torch.bfloat16)
    assert torch.equal(block.best(), block.scores().argmax(-1))
