# SPDX-License-Identifier: Apache-2.0
"""The laid-out steps are the head's own, bit for bit."""

import pytest
import torch
import torch.nn.functional as F

from vllm_domino.head import DominoHead, HeadShape
from vllm_domino.steps import State, Steps

DTYPES = [torch.float32, torch.bfloat16]
# Wide enough for the GRU's weights to be laid out.
SHAPE = HeadShape(hidden_size=640, gru_hidden_dim=700, emb_dim=32, vocab_size=301)


class Case:
    def __init__(self, dtype: torch.dtype, num_reqs: int) -> None:
        torch.manual_seed(num_reqs)
        self.head = DominoHead(SHAPE, 1).requires_grad_(False).to(dtype)
        self.table = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size).to(dtype)
        self.state = torch.tanh(torch.randn(num_reqs, SHAPE.gru_hidden_dim)).to(dtype)
        self.tokens = torch.randint(SHAPE.vocab_size, (num_reqs,))
        self.expected = self.head.advance(self.table[self.tokens], self.state)

    def state_in(self, steps: Steps) -> State:
        recurrent = F.linear(self.state, self.head.prefix_gru.weight_hh_l0)
        return State(self.state, recurrent)

    def same(self, found: State) -> bool:
        return bool(torch.equal(found.hidden, self.expected))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table[tokens]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_reqs", [1, 5, 64])
def test_a_step(num_reqs: int, dtype: torch.dtype) -> None:
    case = Case(dtype, num_reqs)
    steps = Steps(case.head, case.embed)
    found = steps.advance(case.tokens, case.state_in(steps))
    assert case.same(found)
    assert (found.recurrent is not None) == (dtype == torch.bfloat16)
    if found.recurrent is not None:
        # W_hh and W1 in one.
        weight = case.head.prefix_gru.weight_hh_l0
        assert torch.equal(found.recurrent, F.linear(found.hidden, weight))
        z = torch.randn(num_reqs, SHAPE.emb_dim).to(dtype)
        assert torch.equal(
            steps.bottleneck(z, found), case.head.bottleneck(z, found[0])
        )


@pytest.mark.parametrize("num_reqs", [1, 5])
def test_a_step_from_projected_embeddings(num_reqs: int) -> None:
    case = Case(torch.bfloat16, num_reqs)
    gates = case.head.project_embeddings(case.table, rows=40)
    steps = Steps(case.head, case.embed, gates)
    found = steps.advance(case.tokens, case.state_in(steps))
    torch.testing.assert_close(found.hidden, case.expected)


def test_a_step_that_was_foreseen() -> None:
    case = Case(torch.bfloat16, 3)
    steps = Steps(case.head, case.embed)
    others = (case.tokens[:, None] + torch.tensor([1, 0, 2])) % SHAPE.vocab_size
    bonus = (case.tokens + 7) % SHAPE.vocab_size
    foreseen = steps.foresee(bonus, torch.stack([others + 3, others], dim=1))
    assert foreseen is not None
    gates = foreseen.look_up(2, case.tokens)
    assert gates is not None
    assert case.same(steps.advance(case.tokens, case.state_in(steps), gates))
    # One that was not spoils it for all.
    assert foreseen.look_up(1, case.tokens) is None
    first = foreseen.look_up(0, bonus)
    assert torch.equal(steps.start(bonus, first).hidden, steps.start(bonus).hidden)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bottleneck(dtype: torch.dtype) -> None:
    case = Case(dtype, 5)
    steps = Steps(case.head, case.embed)
    hidden = torch.randn(5, 4, SHAPE.hidden_size).to(dtype)
    projected = steps.project_hidden(hidden)
    found = steps.bottleneck(projected[:, 2], State(case.state))
    theirs = case.head.project_hidden(hidden)
    torch.testing.assert_close(found, case.head.bottleneck(theirs[:, 2], case.state))
    whole = torch.cat([hidden[:, 2], case.state], dim=-1)
    # W1's two parts are rounded before they are added.
    expected = case.head.embed_proj[:2](whole)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
