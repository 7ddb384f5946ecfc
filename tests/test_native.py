# SPDX-License-Identifier: Apache-2.0
"""native.cpp drafts what the reference does, and is used only where it can."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_rollouts import Blocks
from vllm_domino.config import RuntimeConfig
from vllm_domino.head import HeadShape
from vllm_domino.head_mode import make_rollout
from vllm_domino.native import Native, misfit
from vllm_domino.steps import Steps

# Neither width is a whole number of tiles.
SHAPE = HeadShape(hidden_size=24, gru_hidden_dim=48, emb_dim=16, vocab_size=1009)


def native(blocks: Blocks) -> Native:
    assert misfit(blocks.steps, blocks.table) is None
    return Native(blocks.steps, blocks.table)


@pytest.mark.parametrize("num_reqs", [1, 2, 3, 4, 5, 8, 11, 64])
@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1009])
def test_it_drafts_what_the_reference_does(num_reqs: int, vocab: int) -> None:
    shape = SHAPE._replace(vocab_size=vocab)
    for seed in range(4):
        blocks = Blocks(num_reqs, shape=shape, seed=seed)
        assert torch.equal(blocks.drafts(native(blocks)), blocks.reference())


@settings(deadline=None, max_examples=60)
@given(
    num_reqs=st.integers(1, 9),
    num_drafts=st.integers(1, 16),
    prefix=st.integers(0, 17),
    gru=st.sampled_from([16, 32, 112]),
    bottleneck=st.sampled_from([16, 64]),
    vocab=st.integers(2, 300),
    seed=st.integers(0, 2**31),
)
def test_of_any_size(
    num_reqs: int,
    num_drafts: int,
    prefix: int,
    gru: int,
    bottleneck: int,
    vocab: int,
    seed: int,
) -> None:
    shape = HeadShape(24, gru, bottleneck, vocab)
    blocks = Blocks(num_reqs, num_drafts, prefix, seed=seed, shape=shape)
    assert torch.equal(blocks.drafts(native(blocks)), blocks.reference())


def test_embeddings_that_are_projected_already() -> None:
    blocks = Blocks(shape=SHAPE)
    gates = blocks.head.project_embeddings(blocks.table)
    steps = Steps(blocks.head, blocks.embed, gates)
    assert torch.equal(blocks.drafts(Native(steps, blocks.table)), blocks.reference())


def test_views_and_small_integers() -> None:
    """As the runner hands them over."""
    blocks = Blocks(num_reqs=5, shape=SHAPE)
    by, expected = native(blocks), blocks.reference()
    wide = torch.zeros(5, 6, 1100)
    wide[..., :1009] = blocks.base
    bonus = torch.zeros(5, 7, dtype=torch.int32)
    bonus[:, 0] = blocks.bonus
    found = by.draft(
        blocks.hidden.transpose(0, 1).contiguous().transpose(0, 1),
        wide[..., :1009],
        bonus.flatten()[::7],
        lambda values, ids: ids,
    )
    assert torch.equal(found, expected)


# --- Scores that no head should have ---


def equal_scores(blocks: Blocks) -> None:
    blocks.base.zero_()
    blocks.head.embed_proj[2].weight.zero_()


def equal_rows(blocks: Blocks) -> None:
    """Each token has a twin, some of them in another tile."""
    weight = blocks.head.embed_proj[2].weight
    for first, second in ((0, 5), (7, 1000), (64, 128), (63, 64)):
        weight[second] = weight[first]
        blocks.base[..., second] = blocks.base[..., first] = 40.0


def nothing_left(blocks: Blocks) -> None:
    blocks.base.fill_(-torch.inf)


def one_left(blocks: Blocks) -> None:
    blocks.base.fill_(-torch.inf)
    blocks.base[..., 1008] = -1e30


def not_numbers(blocks: Blocks) -> None:
    blocks.base[:, 2, 700] = torch.nan
    blocks.base[:, 2, 900] = torch.nan
    blocks.base[:, 2, 3] = torch.inf
    blocks.base[:, 4, 1008] = torch.nan


def infinite(blocks: Blocks) -> None:
    blocks.base[:, 1, 77] = torch.inf
    blocks.base[:, 1, 78] = torch.inf


def huge_corrections(blocks: Blocks) -> None:
    blocks.head.embed_proj[2].weight.mul_(1e30)


def denormal(blocks: Blocks) -> None:
    blocks.base.mul_(1e-40)
    blocks.head.embed_proj[2].weight.zero_()


def saturated(blocks: Blocks) -> None:
    """Gates far beyond where a sigmoid ends."""
    blocks.head.prefix_gru.weight_ih_l0.mul_(1e4)
    blocks.head.embed_proj[0].weight.mul_(1e3)


@pytest.mark.parametrize(
    "damage",
    [
        equal_scores,
        equal_rows,
        nothing_left,
        one_left,
        not_numbers,
        infinite,
        huge_corrections,
        denormal,
        saturated,
    ],
)
@pytest.mark.parametrize("num_reqs", [1, 3, 6])
def test_scores_that_no_head_should_have(damage: object, num_reqs: int) -> None:
    assert callable(damage)
    blocks = Blocks(num_reqs, shape=SHAPE)
    damage(blocks)
    blocks.steps = Steps(blocks.head, blocks.embed)
    assert torch.equal(blocks.drafts(native(blocks)), blocks.reference())


# --- Where it is used ---


def test_a_small_head_on_a_cpu_is_drafted_by_it() -> None:
    blocks = Blocks(shape=SHAPE)
    for runtime in (RuntimeConfig(), RuntimeConfig(head="fused")):
        mode, by = make_rollout(runtime, blocks.steps, False, True, blocks.table)
        assert (mode, type(by)) == ("fused", Native)


@pytest.mark.parametrize(
    ("blocks", "alone", "reason"),
    [
        (Blocks(shape=SHAPE, dtype=torch.bfloat16), True, "float32"),
        (Blocks(shape=SHAPE), False, "not whole"),
        (Blocks(shape=SHAPE._replace(emb_dim=6)), True, "multiples of"),
        (Blocks(shape=SHAPE._replace(vocab_size=90_000)), True, "32 MiB"),
    ],
)
def test_what_it_cannot_draft_is_dense(
    blocks: Blocks, alone: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = blocks.steps, False, alone, blocks.table
    assert make_rollout(RuntimeConfig(), *arguments)[0] == "dense"
    assert not caplog.records
    mode, by = make_rollout(RuntimeConfig(head="fused"), *arguments)
    assert mode == "dense"
    assert reason in caplog.text
    assert torch.equal(blocks.drafts(by), blocks.reference())


def test_without_a_compiler_torch_drafts(tmp_path: Path) -> None:
    program = (
        "from tests.test_native import *\n"
        "blocks = Blocks(shape=SHAPE)\n"
        "mode, by = make_rollout("
        "RuntimeConfig(), blocks.steps, False, True, blocks.table)\n"
        "assert torch.equal(blocks.drafts(by), blocks.reference())\n"
        "print(mode)\n"
    )
    missing = {"CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | missing,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "dense"
    assert "Install g++" in done.stderr
