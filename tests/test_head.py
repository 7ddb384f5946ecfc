# SPDX-License-Identifier: Apache-2.0
"""The head's rollout against the method written out the long way."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.capture import CaptureError, no_host_sync
from vllm_domino.head import DominoHead, HeadShape, rollout

SHAPE = HeadShape(hidden_size=24, gru_hidden_dim=12, emb_dim=6, vocab_size=53)


def make_head(prefix: int, seed: int = 0) -> tuple[DominoHead, torch.nn.Embedding]:
    torch.manual_seed(seed)
    head = DominoHead(SHAPE, prefix).requires_grad_(False)
    # Loud corrections, so that the tokens depend on them.
    head.embed_proj[2].weight.mul_(20)
    table = torch.nn.Embedding(SHAPE.vocab_size, SHAPE.hidden_size)
    return head, table.requires_grad_(False)


def make_block(num_reqs: int, num_drafts: int) -> tuple[torch.Tensor, ...]:
    hidden = torch.randn(num_reqs, num_drafts, SHAPE.hidden_size)
    base = torch.randn(num_reqs, num_drafts, SHAPE.vocab_size)
    bonus = torch.randint(SHAPE.vocab_size, (num_reqs,))
    return hidden, base, bonus


def longhand(
    head: DominoHead,
    table: torch.nn.Embedding,
    hidden: torch.Tensor,
    base: torch.Tensor,
    bonus: int,
) -> list[int]:
    """One request; the whole prefix through torch's own GRU at every position."""
    seen = [bonus]
    for i in range(len(hidden)):
        logits = base[i]
        if i >= head.pure_draft_prefix_len:
            state = head.prefix_gru(table(torch.tensor(seen))[None])[0][0, -1]
            joined = torch.cat([hidden[i], state])
            inner = F.silu(head.embed_proj[0].weight @ joined)
            logits = logits + head.embed_proj[2].weight @ inner
        seen.append(int(logits.argmax()))
    return seen[1:]


@pytest.mark.parametrize("prefix", [0, 1, 3, 8])
@pytest.mark.parametrize("num_drafts", [1, 2, 7, 8])
@pytest.mark.parametrize("num_reqs", [1, 5])
def test_rollout_is_the_method(num_reqs: int, num_drafts: int, prefix: int) -> None:
    head, table = make_head(prefix)
    hidden, base, bonus = make_block(num_reqs, num_drafts)
    drafts = rollout(head, hidden, base, bonus, table)
    assert drafts.shape == (num_reqs, num_drafts)
    assert drafts.dtype == torch.int64
    for row in range(num_reqs):
        expected = longhand(head, table, hidden[row], base[row], int(bonus[row]))
        assert drafts[row].tolist() == expected


def test_corrections_decide_tokens_and_earlier_tokens_decide_corrections() -> None:
    head, table = make_head(prefix=0)
    hidden, base, bonus = make_block(64, 6)
    drafts = rollout(head, hidden, base, bonus, table)
    assert (drafts != base.argmax(-1)).float().mean() > 0.5
    other = rollout(head, hidden, base, (bonus + 1) % SHAPE.vocab_size, table)
    assert (drafts[:, 0] != other[:, 0]).any()


def test_the_pure_prefix_keeps_base_tokens_but_feeds_the_gru() -> None:
    head, table = make_head(prefix=2)
    hidden, base, bonus = make_block(16, 5)
    drafts = rollout(head, hidden, base, bonus, table)
    assert torch.equal(drafts[:, :2], base[:, :2].argmax(-1))
    swapped = base.clone()
    swapped[:, 0] = swapped[:, 0].roll(1, dims=-1)  # other tokens at position 0
    assert (rollout(head, hidden, swapped, bonus, table)[:, 2:] != drafts[:, 2:]).any()


def test_the_lowest_id_wins_a_tie() -> None:
    head, table = make_head(prefix=4)
    hidden, base, bonus = make_block(2, 4)
    base[:] = 0
    base[:, :, [9, 30]] = 1
    assert rollout(head, hidden, base, bonus, table).unique().tolist() == [9]


def test_bfloat16_drafts_mostly_agree_with_float32() -> None:
    head, table = make_head(prefix=1)
    hidden, base, bonus = make_block(64, 4)
    exact = rollout(head, hidden, base, bonus, table)
    hidden, base = hidden.bfloat16(), base.bfloat16()
    rounded = rollout(head.bfloat16(), hidden, base, bonus, table.bfloat16())
    assert (exact == rounded).float().mean() > 0.9


def test_pick_chooses_from_the_corrected_logits() -> None:
    head, table = make_head(prefix=0)
    hidden, base, bonus = make_block(3, 4)
    positions = []

    def second_best(position: int, logits: torch.Tensor) -> torch.Tensor:
        positions.append(position)
        return logits.topk(2).indices[:, 1]

    drafts = rollout(head, hidden, base, bonus, table, second_best)
    assert positions == [0, 1, 2, 3]
    greedy = rollout(head, hidden, base, bonus, table)
    assert (drafts[:, 0] != greedy[:, 0]).all()


def test_a_cuda_graph_could_capture_the_rollout() -> None:
    head, table = make_head(prefix=1)
    hidden, base, bonus = make_block(3, 4)
    with no_host_sync():
        rollout(head, hidden, base, bonus, table)


@pytest.mark.parametrize(
    "offence",
    [
        lambda tensor: tensor[0].item(),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: 1 if tensor[0] > 0 else 0,
    ],
)
def test_the_capture_guard_sees_each_offence(
    offence: Callable[[torch.Tensor], object],
) -> None:
    with pytest.raises(CaptureError), no_host_sync():
        offence(torch.ones(3))
