# SPDX-License-Identifier: Apache-2.0
"""The Domino head: a causal correction of logits that were drafted in parallel.

The backbone drafts a whole block at once, so no base logit knows which tokens were
picked before it. The head carries the picked tokens in a GRU and corrects the base
logits position by position (arXiv 2605.29707, section 3):

    logits_i = base_i + [i >= pure_draft_prefix_len] * W2 silu(W1 [z_i ; h_i])
    t_{i+1}  = pick(logits_i)            h_{i+1} = GRU(emb(t_{i+1}), h_i)

with t_0 the bonus token and h_0 = GRU(emb(t_0), 0). Parameter names are those of the
checkpoints. Nothing here knows of vLLM: both model runners and the Transformers model
call the same rollout.

Shapes: B requests, K drafts, H width, G GRU width, E bottleneck, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

# (B,) token ids -> (B, H) embeddings; the target's own table.
Embed = Callable[[torch.Tensor], torch.Tensor]
# (draft position, (B, V) corrected logits) -> (B,) token ids.
Pick = Callable[[int, torch.Tensor], torch.Tensor]


class HeadShape(NamedTuple):
    """The sizes that fix the head's tensors, each as in the draft's config."""

    hidden_size: int
    gru_hidden_dim: int
    emb_dim: int
    vocab_size: int


def greedy(position: int, logits: torch.Tensor) -> torch.Tensor:
    """Picks the likeliest token; the lowest id wins a tie."""
    return logits.argmax(dim=-1)


class HeadSteps:
    """The correction's steps, for whatever module holds the head's weights.

    Checkpoints keep ``prefix_gru`` and ``embed_proj`` at the top, beside the backbone,
    so the Transformers model holds them itself; in vLLM a ``DominoHead`` does.

    Attributes:
        prefix_gru: One layer, no bias, H -> G.
        embed_proj: Linear(H + G -> E), SiLU, Linear(E -> V), no biases.
        pure_draft_prefix_len: How many leading drafts keep their base logits.
    """

    prefix_gru: nn.GRU
    embed_proj: nn.Sequential
    pure_draft_prefix_len: int

    def make_head(self, shape: HeadShape) -> None:
        """Creates the weights; call it in the module's ``__init__``."""
        hidden, gru, bottleneck, vocab = shape
        self.prefix_gru = nn.GRU(hidden, gru, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden + gru, bottleneck, bias=False),
            nn.SiLU(),
            nn.Linear(bottleneck, vocab, bias=False),
        )

    def initial_state(self, embedding: torch.Tensor) -> torch.Tensor:
        """The GRU state (B, G) after the bonus token's embedding (B, H)."""
        zeros = embedding.new_zeros(embedding.shape[0], self.prefix_gru.hidden_size)
        return self.advance(embedding, zeros)

    def advance(self, embedding: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The GRU state (B, G) after one more token's embedding (B, H)."""
        # torch.gru_cell, not nn.GRU.forward: the latter goes through cuDNN, whose
        # packed weights a captured CUDA graph cannot share.
        return torch.gru_cell(
            embedding,
            state,
            self.prefix_gru.weight_ih_l0,
            self.prefix_gru.weight_hh_l0,
        )

    def advance_from(
        self, gates: torch.Tensor, recurrent: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        """As ``advance``, from W_ih emb(t) and W_hh h, (B, 3 G) each.

        The operations of torch's own cell on a CPU in its order, so that their
        roundings are the same.
        """
        reset_x, new_x = gates.split([2 * state.shape[-1], state.shape[-1]], dim=-1)
        reset_h, new_h = recurrent.split(reset_x.shape[-1], dim=-1)
        reset, update = (reset_h + reset_x).sigmoid_().chunk(2, dim=-1)
        new = torch.tanh(new_x + new_h * reset)
        return (state - new).mul_(update).add_(new)

    def project_embeddings(self, table: torch.Tensor, rows: int = 4096) -> torch.Tensor:
        """W_ih times every row of an embedding table: (V, H) -> (V, 3 G). It saves the
        reading of W_ih at every step, and takes 6 G bytes a token in bfloat16: 0.93 GB
        for Qwen3-8B."""
        weight = self.prefix_gru.weight_ih_l0
        gates = table.new_empty(len(table), len(weight))
        for start in range(0, len(table), rows):
            part = slice(start, start + rows)
            gates[part] = F.linear(table[part].to(weight.dtype), weight)
        return gates

    def project_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """The part of W1 [z ; h] that the backbone fixes: (..., H) -> (..., E).

        One GEMM serves the whole block; only the part of ``h`` is sequential.
        """
        return F.linear(hidden, self.embed_proj[0].weight[:, : hidden.shape[-1]])

    def bottleneck(
        self, projected_hidden: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        """silu(W1 [z ; h]): (..., E), (..., G) -> (..., E)."""
        state_weight = self.embed_proj[0].weight[:, self.prefix_gru.input_size :]
        return F.silu(projected_hidden + F.linear(state, state_weight))

    def correction(
        self, projected_hidden: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        """What is added to the base logits: (B, E), (B, G) -> (B, V)."""
        inner = self.bottleneck(projected_hidden, state)
        return F.linear(inner, self.embed_proj[2].weight)


class DominoHead(HeadSteps, nn.Module):
    """A module that holds the head's weights and nothing else.

    Args:
        shape: Sizes of the tensors.
        pure_draft_prefix_len: How many leading drafts keep their base logits.
    """

    def __init__(self, shape: HeadShape, pure_draft_prefix_len: int) -> None:
        super().__init__()
        self.pure_draft_prefix_len = pure_draft_prefix_len
        self.make_head(shape)


def rollout(
    head: HeadSteps,
    hidden: torch.Tensor,
    base_logits: torch.Tensor,
    bonus: torch.Tensor,
    embed: Embed,
    pick: Pick = greedy,
) -> torch.Tensor:
    """Drafts K tokens a request over the full vocabulary.

    Fixed shapes and no host synchronisation, so a CUDA graph can capture it.

    Args:
        head: The trained head.
        hidden: (B, K, H) the backbone's rows that predict the K drafts, after its
            final norm.
        base_logits: (B, K, V) those rows through the target's lm_head.
        bonus: (B,) the token each block continues.
        embed: The target's token embedding.
        pick: How a token is chosen from its corrected logits; greedy if not given.

    Returns:
        (B, K) the drafted tokens, int64.
    """
    num_drafts = hidden.shape[1]
    projected = head.project_hidden(hidden)
    state = head.initial_state(embed(bonus))
    drafts = torch.empty(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
    for i in range(num_drafts):
        logits = base_logits[:, i]
        if i >= head.pure_draft_prefix_len:
            logits = logits + head.correction(projected[:, i], state)
        drafts[:, i] = pick(i, logits)
        if i + 1 < num_drafts:
            state = head.advance(embed(drafts[:, i]), state)
    return drafts
