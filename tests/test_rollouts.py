# SPDX-License-Identifier: Apache-2.0
"""``Exact`` drafts what the reference does, guesses right or wrong; a pool drafts the
best of its own."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_domino import vocabulary
from vllm_domino.config import RuntimeConfig
from vllm_domino.exact import Exact
from vllm_domino.head import DominoHead, HeadShape, rollout
from vllm_domino.head_mode import make_rollout
from vllm_domino.rollouts import Rollout, StepByStep
from vllm_domino.scoring import Dense, Pool
from vllm_domino.steps import Steps

DTYPES = [torch.float32, torch.bfloat16]
SHAPE = HeadShape(hidden_size=24, gru_hidden_dim=12, emb_dim=6, vocab_size=1009)


class Blocks:
    """A head and blocks to draft; corrections large enough to move many winners."""

    def __init__(
        self,
        num_reqs: int = 3,
        num_drafts: int = 6,
        prefix: int = 1,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        shape: HeadShape = SHAPE,
        correction: float = 10.0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator)

        self.head = DominoHead(shape, prefix).requires_grad_(False)
        for parameter in self.head.parameters():
            parameter.copy_(normal(*parameter.shape) * parameter.shape[-1] ** -0.5)
        self.head.embed_proj[2].weight.mul_(correction)
        self.head.to(dtype)
        hidden, vocab = shape.hidden_size, shape.vocab_size
        self.table = normal(vocab, hidden).to(dtype)
        self.hidden = normal(num_reqs, num_drafts, hidden).to(dtype)
        self.base = (normal(num_reqs, num_drafts, vocab) * 2).to(dtype)
        self.bonus = torch.randint(vocab, (num_reqs,), generator=generator)
        self.steps = Steps(self.head, self.embed)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table[tokens]

    def reference(self) -> torch.Tensor:
        return rollout(self.head, self.hidden, self.base, self.bonus, self.embed)

    def drafts(self, by: Rollout) -> torch.Tensor:
        base = self.base.clone()
        found = by.draft(self.hidden, base, self.bonus, lambda values, ids: ids)
        assert torch.equal(base.nan_to_num(7.0), self.base.nan_to_num(7.0))
        return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_reqs", [1, 2, 7, 64])
@pytest.mark.parametrize("size", [1, 5, 60, 800])
def test_exact_drafts_what_dense_does(
    size: int, num_reqs: int, dtype: torch.dtype
) -> None:
    """Whether it guesses from one token or from nearly all."""
    for seed in range(4):
        blocks = Blocks(num_reqs, dtype=dtype, seed=seed)
        expected = blocks.reference()
        dense = StepByStep(blocks.steps, Dense(blocks.steps.vocab))
        assert torch.equal(blocks.drafts(dense), expected)
        assert torch.equal(blocks.drafts(Exact(blocks.steps, size)), expected)


@pytest.mark.parametrize("prefix", [0, 1, 3, 6, 9])
@pytest.mark.parametrize("num_reqs", [1, 5])
def test_uncorrected_positions(num_reqs: int, prefix: int) -> None:
    blocks = Blocks(num_reqs, prefix=prefix)
    for by in (
        Exact(blocks.steps, 9),
        StepByStep(blocks.steps, Dense(blocks.steps.vocab)),
        StepByStep(blocks.steps, Pool(blocks.steps.vocab, 10_000)),
    ):
        assert torch.equal(blocks.drafts(by), blocks.reference())


def test_the_correction_moves_winners() -> None:
    """Else the tests above would show nothing."""
    blocks = Blocks(64)
    moved = blocks.reference()[:, 1:] != blocks.base.argmax(-1)[:, 1:]
    assert moved.float().mean() > 0.3


def count_calls(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> list[tuple[int, ...]]:
    """The shape of the first argument of each call from now on."""
    found: list[tuple[int, ...]] = []
    original: Callable[..., object] = getattr(owner, name)

    def counted(self: object, first: torch.Tensor, *rest: object) -> object:
        found.append(tuple(first.shape))
        return original(self, first, *rest)

    monkeypatch.setattr(owner, name, counted)
    return found


def test_a_right_guess_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = Blocks(num_reqs=4)
    checks = count_calls(monkeypatch, vocabulary.Vocabulary, "best")
    assert torch.equal(blocks.drafts(Exact(blocks.steps, 900)), blocks.reference())
    assert checks == [(4, 5, SHAPE.vocab_size)]


def test_guesses_that_stay_wrong_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of one token: after three rounds the rest is scored step by step."""
    blocks = Blocks(num_reqs=1, num_drafts=12)
    checks = count_calls(monkeypatch, vocabulary.Vocabulary, "best")
    assert torch.equal(blocks.drafts(Exact(blocks.steps, 1)), blocks.reference())
    whole = [shape for shape in checks if shape[1] > 1]
    assert len(whole) == 3
    assert len(checks) > 3 + 4


def test_only_requests_with_a_wrong_guess_are_guessed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = Blocks(num_reqs=16, correction=3.0)
    checks = count_calls(monkeypatch, vocabulary.Vocabulary, "best")
    assert torch.equal(blocks.drafts(Exact(blocks.steps, 60)), blocks.reference())
    assert checks[0][0] == 16
    assert 0 < checks[1][0] < 16


def test_likely_tokens_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = HeadShape(hidden_size=64, gru_hidden_dim=48, emb_dim=32, vocab_size=2003)
    blocks = Blocks(1, 8, dtype=torch.bfloat16, shape=shape, correction=1.0)
    embedded: list[int] = []

    def embed(tokens: torch.Tensor) -> torch.Tensor:
        embedded.append(len(tokens))
        return blocks.table[tokens]

    steps = Steps(blocks.head, embed)
    for foresees, fewest in ((True, 0), (False, 8)):
        embedded.clear()
        by = Exact(steps, 100, foresees)
        assert torch.equal(blocks.drafts(by), blocks.reference())
        assert (max(embedded) > 1) == foresees
        assert embedded.count(1) >= fewest
        assert foresees == (embedded.count(1) < 8)


# A machine's own, of inf - inf, has its sign bit set.
NEGATIVE_NAN = math.copysign(torch.nan, -1)


@pytest.mark.parametrize("what", ["base", "weight", "hidden"])
@pytest.mark.parametrize("value", [torch.nan, NEGATIVE_NAN, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_none(value: float, what: str, dtype: torch.dtype) -> None:
    blocks = Blocks(num_reqs=3, dtype=dtype)
    if what == "base":
        blocks.base[1, 2, 500] = value
        blocks.base[2, 4, 7:300] = value
    elif what == "weight":
        blocks.head.embed_proj[2].weight[333, 2] = value
    else:
        blocks.hidden[1, 3, 5] = value
    assert torch.equal(blocks.drafts(Exact(blocks.steps, 20)), blocks.reference())


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties(dtype: torch.dtype) -> None:
    """Of equals the lowest id, in the pool or not."""
    blocks = Blocks(num_reqs=5, dtype=dtype, correction=0.0)
    blocks.base = blocks.base.round()
    assert torch.equal(blocks.drafts(Exact(blocks.steps, 20)), blocks.reference())


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_reqs=st.integers(1, 9),
    num_drafts=st.integers(1, 9),
    prefix=st.integers(0, 3),
    size=st.integers(1, 1008),
    correction=st.floats(0, 1000),
)
def test_exact_whatever_the_sizes(
    seed: int,
    num_reqs: int,
    num_drafts: int,
    prefix: int,
    size: int,
    correction: float,
) -> None:
    blocks = Blocks(
        num_reqs, num_drafts, prefix, torch.bfloat16, seed, correction=correction
    )
    assert torch.equal(blocks.drafts(Exact(blocks.steps, size)), blocks.reference())


def test_ranks_and_reduced_vocabularies_choose_other_ids() -> None:
    """What is fed back is the target's id, not the rank's."""
    blocks = Blocks(num_reqs=4)
    theirs = torch.randperm(SHAPE.vocab_size)

    def drafts(by: Rollout) -> torch.Tensor:
        return by.draft(
            blocks.hidden, blocks.base, blocks.bonus, lambda values, ids: theirs[ids]
        )

    dense = drafts(StepByStep(blocks.steps, Dense(blocks.steps.vocab)))
    assert not torch.equal(dense, blocks.reference())
    assert torch.equal(drafts(Exact(blocks.steps, 30, foresees=False)), dense)


# --- The pool ---


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab", [997, 40_003])
def test_a_pool_picks_the_best_of_its_own(vocab: int, tied: bool) -> None:
    """And of equals the lowest id, wherever it lies in the pool."""
    generator = torch.Generator().manual_seed(4)
    base = torch.randn(5, 6, vocab, generator=generator) * 3
    weight = torch.randn(vocab, 16, generator=generator)
    inner = torch.randn(6, 5, 16, generator=generator)
    if tied:
        base, weight, inner = base.round(), torch.zeros_like(weight), inner
    block = Pool(weight, 50).open(base, 1)
    assert block.pool.shape == (5, 50)
    peaks = base[:, 1:].amax(dim=1)
    smallest = peaks.gather(1, block.pool).amin(dim=1, keepdim=True)
    assert ((peaks > smallest).sum(dim=1) < 50).all()
    for i in range(1, 6):
        logits = base[:, i] + inner[i] @ weight.T
        kept = torch.full_like(logits, -torch.inf)
        kept.scatter_(1, block.pool, logits.gather(1, block.pool))
        assert torch.equal(block.best(i, inner[i])[1], kept.argmax(-1))


# --- What a user chooses ---


@pytest.mark.parametrize(
    ("runtime", "kind"),
    [
        (RuntimeConfig(head="dense"), StepByStep),
        (RuntimeConfig(head="pool"), StepByStep),
        (RuntimeConfig(head="exact", pool_size=100), Exact),
        # As many guesses as tokens: there is nothing to check.
        (RuntimeConfig(head="exact", pool_size=1009), StepByStep),
    ],
)
def test_the_rollout_that_was_asked_for(
    runtime: RuntimeConfig, kind: type[Rollout]
) -> None:
    blocks = Blocks()
    _, found = make_rollout(runtime, blocks.steps, captured=False, alone=True)
    assert type(found) is kind
    if runtime.head != "pool":
        assert torch.equal(blocks.drafts(found), blocks.reference())


@pytest.mark.parametrize(
    ("captured", "dtype", "bottleneck", "mode"),
    [
        (False, torch.bfloat16, 512, "exact"),
        (False, torch.bfloat16, 8, "dense"),
        (False, torch.float32, 512, "dense"),
        (True, torch.bfloat16, 512, "dense"),
    ],
)
def test_what_is_fastest_where_nothing_was_chosen(
    captured: bool, dtype: torch.dtype, bottleneck: int, mode: str
) -> None:
    shape = SHAPE._replace(emb_dim=bottleneck, vocab_size=40_000)
    blocks = Blocks(num_reqs=2, num_drafts=3, dtype=dtype, shape=shape)
    found, by = make_rollout(
        RuntimeConfig(), blocks.steps, captured, True, blocks.table
    )
    assert found == mode
    assert torch.equal(blocks.drafts(by), blocks.reference())


def test_parts_smaller_than_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_PART", 100)
    blocks = Blocks(num_reqs=9, dtype=torch.bfloat16)
    assert torch.equal(blocks.drafts(Exact(blocks.steps, 15)), blocks.reference())
