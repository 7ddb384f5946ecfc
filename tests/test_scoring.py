# SPDX-License-Identifier: Apache-2.0
"""The pruned scorer picks what the dense one picks, whatever the numbers are."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_domino.head import DominoHead, HeadShape, rollout, rollout_likeliest
from vllm_domino.scoring import Dense, Exact, Pool, Scorer

DTYPES = [torch.float32, torch.bfloat16]


class Block:
    """A block's base logits (B, K, V), W2 (V, E), and c at each position (K, B, E)."""

    def __init__(
        self, base: torch.Tensor, weight: torch.Tensor, inner: torch.Tensor
    ) -> None:
        self.base, self.weight, self.inner = base, weight, inner

    def to(self, dtype: torch.dtype) -> "Block":
        return Block(*(t.to(dtype) for t in (self.base, self.weight, self.inner)))

    def picked(self, scorer: Scorer) -> torch.Tensor:
        block = scorer.open(self.base, 0)
        steps = [block.corrected(i, inner) for i, inner in enumerate(self.inner)]
        return torch.stack([ids for _, ids in steps])


def peaked(num_reqs: int, num_drafts: int, vocab: int, width: int, seed: int) -> Block:
    """Base logits with a peak and corrections that often move it, as a trained head's:
    half of W2's energy in an eighth of its directions."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    spectrum = torch.exp(-torch.arange(width) / (width / 8))
    turn = torch.linalg.qr(normal(width, width))[0]
    weight = (normal(vocab, width) * spectrum) @ turn
    weight = weight * (0.5 + torch.rand(vocab, 1, generator=generator))
    inner = F.silu(normal(num_drafts, num_reqs, width))
    base = normal(num_reqs, num_drafts, vocab) * 3
    spread = (inner[0] @ weight.T).std()
    return Block(base, weight / spread, inner)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_reqs", [1, 2, 7, 64])
def test_it_picks_what_dense_picks(num_reqs: int, dtype: torch.dtype) -> None:
    moved = 0.0
    for seed in range(4):
        block = peaked(num_reqs, 8, 5003, 32, seed).to(dtype)
        dense = block.picked(Dense(block.weight))
        assert torch.equal(block.picked(Exact(block.weight)), dense)
        moved += (block.base.argmax(-1) != dense.T).float().mean().item() / 4
    assert moved > 0.3


def test_it_reads_a_small_part() -> None:
    block = peaked(1, 8, 20_011, 64, 0)
    scorer = Exact(block.weight)
    left = [
        len(scorer.survivors(block.base[:, i], inner))
        for i, inner in enumerate(block.inner)
    ]
    assert 0 < max(left) < 0.01 * len(block.weight)


@pytest.mark.parametrize("rank", [0, 1, 5, 32, 99])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_is_one(rank: int, dtype: torch.dtype) -> None:
    """No score is above its bound, whatever part of it is known."""
    block = peaked(3, 4, 2003, 32, 8).to(dtype)
    scorer = Exact(block.weight, rank)
    for inner in block.inner:
        score = F.linear(inner, block.weight)
        assert bool((scorer.bounds(inner) >= score).all())


@pytest.mark.parametrize("rank", [0, 1, 5, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_rank_picks_the_same(rank: int, dtype: torch.dtype) -> None:
    block = peaked(3, 6, 4001, 32, 5).to(dtype)
    exact = block.picked(Exact(block.weight, rank))
    assert torch.equal(exact, block.picked(Dense(block.weight)))


# --- Numbers made to break the bound ---

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


@pytest.mark.parametrize("rank", [2, 14])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", MAKERS)
def test_never_a_wrong_token(make: Make, dtype: torch.dtype, rank: int) -> None:
    for seed in range(5):
        block = make(torch.Generator().manual_seed(seed)).to(dtype)
        exact = block.picked(Exact(block.weight, rank))
        assert torch.equal(exact, block.picked(Dense(block.weight)))


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_reqs=st.integers(1, 9),
    base_scale=st.floats(0, 100),
    weight_scale=st.floats(1e-6, 100),
    grid=st.sampled_from([0.0, 0.25, 1.0]),
    rank=st.integers(0, 12),
    dtype=st.sampled_from(DTYPES),
)
def test_never_a_wrong_token_whatever_the_scales(
    seed: int,
    num_reqs: int,
    base_scale: float,
    weight_scale: float,
    grid: float,
    rank: int,
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
    exact = block.picked(Exact(block.weight, rank))
    assert torch.equal(exact, block.picked(Dense(block.weight)))


# --- The pool, and whole blocks ---


def test_a_pool_of_everything_is_dense() -> None:
    block = peaked(5, 6, 997, 16, 3)
    everything = block.picked(Pool(block.weight, 10_000))
    assert torch.equal(everything, block.picked(Dense(block.weight)))


@pytest.mark.parametrize("tied", [False, True])
def test_a_pool_picks_the_best_of_its_own(tied: bool) -> None:
    """And of equals the lowest id, wherever it lies in the pool."""
    generator = torch.Generator().manual_seed(4)
    block = ties(generator) if tied else peaked(5, 6, 997, 16, 3)
    pool = block.base.amax(dim=1).topk(50, dim=-1).indices
    for i, picked in enumerate(block.picked(Pool(block.weight, 50))):
        logits = block.base[:, i] + block.inner[i] @ block.weight.T
        kept = torch.full_like(logits, -torch.inf)
        kept.scatter_(1, pool, logits.gather(1, pool))
        assert torch.equal(picked, kept.argmax(-1))


@pytest.mark.parametrize("prefix", [0, 1, 3, 6])
@pytest.mark.parametrize("num_reqs", [1, 5])
@pytest.mark.parametrize("kind", [Dense, Exact])
def test_whole_blocks(
    kind: type[Dense] | type[Exact], num_reqs: int, prefix: int
) -> None:
    torch.manual_seed(prefix)
    shape = HeadShape(hidden_size=24, gru_hidden_dim=12, emb_dim=6, vocab_size=1009)
    head = DominoHead(shape, prefix).requires_grad_(False)
    head.embed_proj[2].weight.mul_(10)
    table = torch.randn(1009, 24)
    hidden, base = torch.randn(num_reqs, 6, 24), torch.randn(num_reqs, 6, 1009) * 2
    bonus = torch.randint(1009, (num_reqs,))
    expected = rollout(head, hidden, base, bonus, lambda ids: table[ids])
    scorer = kind(head.embed_proj[2].weight)
    drafts = rollout_likeliest(
        head,
        hidden,
        base,
        bonus,
        lambda ids, state: head.advance(table[ids], state),
        scorer,
    )
    assert torch.equal(drafts, expected)


def test_projected_embeddings_are_the_same_step() -> None:
    torch.manual_seed(0)
    shape = HeadShape(hidden_size=24, gru_hidden_dim=12, emb_dim=6, vocab_size=101)
    head = DominoHead(shape, 0).requires_grad_(False)
    table, state = torch.randn(101, 24), torch.randn(7, 12)
    ids = torch.randint(101, (7,))
    gates = head.project_embeddings(table, rows=40)
    torch.testing.assert_close(
        head.advance_from(gates[ids], state), head.advance(table[ids], state)
    )
