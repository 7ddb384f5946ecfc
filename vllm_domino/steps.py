# SPDX-License-Identifier: Apache-2.0
"""The head's products, with its weights laid out once: what every rollout is made of.

Shapes: B requests, K drafts, H width, G GRU, E bottleneck, V vocabulary (of one rank).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from vllm_domino.head import Embed, HeadSteps
from vllm_domino.linear import linear


@dataclass
class Foreseen:
    """What the GRU takes in for tokens that may come next: one product instead of one a
    token."""

    tokens: torch.Tensor  # (B, m) a step: the bonus token, the first draft, ...
    gates: torch.Tensor

    def of(self, requests: torch.Tensor) -> "Foreseen":
        return Foreseen(self.tokens[requests], self.gates[requests])

    def look_up(self, step: int, tokens: torch.Tensor) -> torch.Tensor | None:
        """Gates (B, 3 G) of tokens (B,), if all of them were foreseen."""
        same = self.tokens[:, step] == tokens[:, None]
        if not same.any(dim=1).all():
            return None
        # Of equals, any.
        place = same.int().argmax(dim=1)
        return self.gates[:, step].gather(
            1, place[:, None, None].expand(-1, 1, self.gates.shape[-1])
        )[:, 0]


class State(NamedTuple):
    """The GRU's state, and what follows from it alone."""

    hidden: torch.Tensor  # (B, G)
    # W_hh h and W1 h, one product; None where they are computed when they are needed.
    recurrent: torch.Tensor | None = None  # (B, 3 G)
    inner: torch.Tensor | None = None  # (B, E)

    def of(self, requests: torch.Tensor) -> "State":
        return State(*(None if t is None else t[requests] for t in self))


class Steps:
    """A trained head, ready to draft.

    The GRU is torch's own cell, the shortest way for a small head and one kernel on a
    GPU. In bfloat16 on a CPU, where reading the weights is what takes time, they are
    laid out, W_hh and the part of W1 that multiplies the state as one matrix.

    Args:
        head: Its weights, which must not change after.
        embed: The target's token embedding.
        gates: (V, 3 G), W_ih times each token's embedding (``project_embeddings``), if
            it is at hand: a step then reads one row instead of W_ih.

    Attributes:
        vocab: W2, (V, E).
        state_weight: The part of W1 that multiplies the state, (E, G).
        gru_weights: W_ih (3 G, H) and W_hh (3 G, G).
        prefix: How many leading drafts keep their base logits.
    """

    def __init__(
        self, head: HeadSteps, embed: Embed, gates: torch.Tensor | None = None
    ) -> None:
        self.head = head
        self.embed = embed
        self.gates = gates
        self.prefix = head.pure_draft_prefix_len
        self.vocab = head.embed_proj[2].weight
        hidden, self.state_weight = head.embed_proj[0].weight.split(
            [head.prefix_gru.input_size, head.prefix_gru.hidden_size], dim=1
        )
        self._hidden = linear(hidden)
        self.gru_weights = (head.prefix_gru.weight_ih_l0, head.prefix_gru.weight_hh_l0)
        laid_out = self.vocab.device.type, self.vocab.dtype
        self._by_cell = gates is None and laid_out != ("cpu", torch.bfloat16)
        if not self._by_cell:
            self._input = linear(self.gru_weights[0])
            self._joint = linear(torch.cat([self.gru_weights[1], self.state_weight]))

    def project_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """The part of W1 [z ; h] that the backbone fixes, (..., H) -> (..., E): one
        product for the whole block."""
        return self._hidden(hidden)

    def bottleneck(self, projected_hidden: torch.Tensor, state: State) -> torch.Tensor:
        """c = silu(W1 [z ; h]): (B, E), state -> (B, E)."""
        inner = state.inner
        if inner is None:
            inner = F.linear(state.hidden, self.state_weight)
        return F.silu(projected_hidden + inner)

    def start(self, bonus: torch.Tensor, gates: torch.Tensor | None = None) -> State:
        """The state after the bonus token (B,); gates as in ``advance``."""
        gates_width, width = self.gru_weights[1].shape
        zeros = self.vocab.new_zeros(len(bonus), gates_width)
        return self.advance(bonus, State(zeros[:, :width].contiguous(), zeros), gates)

    def foresee(self, bonus: torch.Tensor, tokens: torch.Tensor) -> Foreseen | None:
        """Works out ahead what ``advance`` needs of the bonus token (B,), and of tokens
        that may be drafted at each position, (B, K, m). None where it saves nothing."""
        if self._by_cell or self.gates is not None:
            return None
        first = bonus[:, None, None].expand(-1, 1, tokens.shape[-1])
        together = torch.cat([bonus[:, None], tokens.flatten(1)], dim=1)
        gates = self._input(self.embed(together.flatten()))
        gates = gates.view(len(bonus), -1, gates.shape[-1])
        rest = gates[:, 1:].unflatten(1, tokens.shape[1:])
        again = gates[:, :1, None].expand(-1, 1, tokens.shape[-1], -1)
        return Foreseen(
            torch.cat([first, tokens], dim=1), torch.cat([again, rest], dim=1)
        )

    def advance(
        self, tokens: torch.Tensor, state: State, gates: torch.Tensor | None = None
    ) -> State:
        """The state after one token more, (B,).

        Args:
            gates: (B, 3 G) W_ih times the tokens' embeddings, where it is known.
        """
        if self._by_cell:
            embedding = self.embed(tokens)
            return State(torch.gru_cell(embedding, state.hidden, *self.gru_weights))
        if gates is None and self.gates is not None:
            gates = F.embedding(tokens, self.gates)
        if gates is None:
            gates = self._input(self.embed(tokens))
        assert state.recurrent is not None
        hidden = self.head.advance_from(gates, state.recurrent, state.hidden)
        joint = self._joint(hidden)
        return State(
            hidden, *joint.split([gates.shape[-1], len(self.state_weight)], -1)
        )
