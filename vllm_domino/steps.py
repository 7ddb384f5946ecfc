# SPDX-License-Identifier: Apache-2.0
"""The head's products, with its weights laid out once: what every rollout is made of.

Shapes: B requests, K drafts, H width, G GRU, E bottleneck, V vocabulary (of one rank).
"""

from dataclasses import dataclass

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


class Steps:
    """A trained head, ready to draft.

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
        hidden, state = head.embed_proj[0].weight.split(
            [head.prefix_gru.input_size, head.prefix_gru.hidden_size], dim=1
        )
        self.state_weight = state
        self._hidden, self._state = linear(hidden), linear(state)
        # A GPU's own GRU cell is one kernel; on a CPU it reads weights as they lie.
        on_cpu, dtype = self.vocab.device.type == "cpu", self.vocab.dtype
        self._by_cell = gates is None and not (on_cpu and dtype == torch.bfloat16)
        self.gru_weights = (head.prefix_gru.weight_ih_l0, head.prefix_gru.weight_hh_l0)
        if not self._by_cell:
            self._input, self._recurrent = map(linear, self.gru_weights)

    def project_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """The part of W1 [z ; h] that the backbone fixes, (..., H) -> (..., E): one
        product for the whole block."""
        return self._hidden(hidden)

    def bottleneck(
        self, projected_hidden: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        """c = silu(W1 [z ; h]): (B, E), (B, G) -> (B, E)."""
        return F.silu(projected_hidden + self._state(state))

    def start(
        self, bonus: torch.Tensor, gates: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The state (B, G) after the bonus token (B,); gates as in ``advance``."""
        return self.advance(bonus, self.zeros(len(bonus)), gates)

    def zeros(self, num_reqs: int) -> torch.Tensor:
        """The state before any token: (B, G)."""
        return self.vocab.new_zeros(num_reqs, self.gru_weights[1].shape[1])

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
        self,
        tokens: torch.Tensor,
        state: torch.Tensor,
        gates: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The state after one token more: (B,), (B, G) -> (B, G).

        Args:
            gates: (B, 3 G) W_ih times the tokens' embeddings, where it is known.
        """
        if self._by_cell:
            return torch.gru_cell(self.embed(tokens), state, *self.gru_weights)
        if gates is None and self.gates is not None:
            gates = self.gates[tokens]
        if gates is None:
            gates = self._input(self.embed(tokens))
        return self.head.advance_from(gates, self._recurrent(state), state)
