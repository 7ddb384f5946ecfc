# SPDX-License-Identifier: Apache-2.0
"""All blocks of a pack in one forward, as if each were drafted alone.

An anchor is a token that starts a block, as a bonus token does in decoding: the block
sees the target's hidden states strictly before it, within its document, and itself.

Shapes: N packs of T tokens, A anchors a pack, Q query rows and K drafts a block.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from vllm_domino.modeling_domino import DominoDraftModel
from vllm_domino.training.data import PADDING, Packs


@dataclass
class Blocks:
    """What the blocks of a batch of packs read and are to predict."""

    queries: torch.Tensor  # (N, A * Q) token ids: anchor, MASK, MASK, ...
    positions: torch.Tensor  # (N, T + A * Q) of the context, then of the queries
    previous: torch.Tensor  # (N, A, K) the token before each draft
    labels: torch.Tensor  # (N, A, K)
    counts: torch.Tensor  # (N, A, K) whether the draft is part of the loss


def sample_anchors(
    packs: Packs, num_anchors: int, generator: torch.Generator
) -> torch.Tensor:
    """(N, A) positions of anchors, none twice; PADDING where a pack has too few.

    An anchor is an answer token with a token before it and an answer token after it.
    """
    follows = torch.zeros_like(packs.is_answer)
    same = packs.documents[:, 1:] == packs.documents[:, :-1]
    follows[:, :-1] = packs.is_answer[:, 1:] & same
    allowed = packs.is_answer & follows & (packs.positions > 0)
    # Random order among the allowed; the others last.
    keys = torch.rand(allowed.shape, generator=generator).masked_fill(~allowed, 2.0)
    order = keys.argsort(dim=-1)[:, :num_anchors]
    chosen = order.masked_fill(~allowed.gather(1, order), PADDING)
    return F.pad(chosen, (0, num_anchors - chosen.shape[1]), value=PADDING)


def make_blocks(draft: DominoDraftModel, packs: Packs, anchors: torch.Tensor) -> Blocks:
    num_packs, length = packs.tokens.shape
    num_drafts = draft.max_drafts
    valid = anchors != PADDING
    start = anchors.clamp(min=0)
    document = packs.documents.gather(1, start)

    # Draft i continues the anchor and i tokens more, and should be the next one.
    offsets = torch.arange(num_drafts, device=anchors.device)
    before = start[..., None] + offsets
    after = before + 1
    inside = after < length
    after, before = after.clamp(max=length - 1), before.clamp(max=length - 1)

    def look_up(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return values.gather(1, where.flatten(1)).view(where.shape)

    counts = inside & valid[..., None] & look_up(packs.is_answer, after)
    counts &= look_up(packs.documents, after) == document[..., None]

    queries = anchors.new_full((*anchors.shape, draft.block_size), draft.mask_token_id)
    queries[..., 0] = packs.tokens.gather(1, start)
    rows = torch.arange(draft.block_size, device=anchors.device)
    query_positions = packs.positions.gather(1, start)[..., None] + rows
    return Blocks(
        queries=queries.view(num_packs, -1),
        positions=torch.cat([packs.positions, query_positions.flatten(1)], dim=1),
        previous=look_up(packs.tokens, before),
        labels=look_up(packs.tokens, after),
        counts=counts,
    )


def attention_mask(
    draft: DominoDraftModel,
    packs: Packs,
    anchors: torch.Tensor,
    dtype: torch.dtype,
) -> Any:
    """What each query row sees, in the form the draft's attention takes."""
    num_packs, length = packs.tokens.shape
    block_size = draft.block_size
    num_queries = anchors.shape[1] * block_size
    device = anchors.device
    start = anchors.clamp(min=0)
    document = packs.documents.gather(1, start)

    def sees(pack: Any, head: Any, query: Any, key: Any) -> Any:
        block = query // block_size
        at = key.clamp(max=length - 1)
        before = (key < start[pack, block]) & (
            packs.documents[pack, at] == document[pack, block]
        )
        return torch.where(key < length, before, (key - length) // block_size == block)

    if draft.config._attn_implementation == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        return create_block_mask(
            sees, num_packs, None, num_queries, length + num_queries, device=device
        )
    mask = sees(
        torch.arange(num_packs, device=device)[:, None, None],
        None,
        torch.arange(num_queries, device=device)[:, None],
        torch.arange(length + num_queries, device=device),
    )[:, None]
    if draft.config._attn_implementation == "sdpa":
        return mask
    lowest = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(
        ~mask, lowest
    )


@dataclass
class Losses:
    """Of one batch. The acceptance lengths are teacher-forced: drafts right in a row
    from the first, plus the bonus token."""

    total: torch.Tensor
    base: torch.Tensor
    final: torch.Tensor
    base_acceptance: torch.Tensor
    final_acceptance: torch.Tensor


class DraftObjective(nn.Module):
    """The draft with its loss: what is wrapped for data parallelism."""

    def __init__(
        self, draft: DominoDraftModel, weights: torch.Tensor, loss_rows: int
    ) -> None:
        """
        Args:
            draft: The draft to train.
            weights: (K,) how much each draft position counts.
            loss_rows: Rows whose (rows, V) logits exist at once.
        """
        super().__init__()
        self.draft = draft
        self.loss_rows = loss_rows
        self.register_buffer("weights", weights, persistent=False)

    def forward(
        self,
        features: torch.Tensor,
        packs: Packs,
        anchors: torch.Tensor,
        embed: nn.Module,
        lm_head: nn.Module,
        base_weight: float,
    ) -> Losses:
        """
        Args:
            features: (N, T, layers * H) the target's hidden states.
            packs: The packs they are of.
            anchors: (N, A) from ``sample_anchors``.
            embed: The target's token embedding, frozen.
            lm_head: The target's lm_head, frozen.
            base_weight: lambda.
        """
        draft = self.draft
        blocks = make_blocks(draft, packs, anchors)
        rows, _ = draft(
            embed(blocks.queries),
            features,
            blocks.positions,
            attention_mask(draft, packs, anchors, features.dtype),
        )
        rows = rows.unflatten(1, (-1, draft.block_size))
        predicting = rows if draft.shift_label else rows[:, :, 1:]
        inner = self._bottleneck(predicting, embed(blocks.previous))
        sums = self._cross_entropies(predicting, inner, blocks, lm_head)
        base_loss, final_loss, base_right, final_right = sums
        weight = (self.weights * blocks.counts).sum().clamp(min=1e-9)
        base, final = base_loss / weight, final_loss / weight
        total = (
            (1 - base_weight) * final + base_weight * base if draft.has_head else base
        )
        return Losses(
            total,
            base.detach(),
            final.detach(),
            _acceptance(base_right, blocks.counts),
            _acceptance(final_right, blocks.counts),
        )

    def _bottleneck(
        self, predicting: torch.Tensor, previous: torch.Tensor
    ) -> torch.Tensor | None:
        """silu(W1 [z ; h]) with the true prefix in the GRU: (N, A, K, E)."""
        draft = self.draft
        if not draft.has_head:
            return None
        states, _ = draft.prefix_gru(previous.flatten(0, 1).to(predicting.dtype))
        states = states.view(*previous.shape[:-1], -1)
        inner = draft.bottleneck(draft.project_hidden(predicting), states)
        positions = torch.arange(inner.shape[2], device=inner.device)
        corrected = positions >= draft.pure_draft_prefix_len
        return inner * corrected[:, None].to(inner.dtype)

    def _cross_entropies(
        self,
        predicting: torch.Tensor,
        inner: torch.Tensor | None,
        blocks: Blocks,
        lm_head: nn.Module,
    ) -> tuple[torch.Tensor, ...]:
        """Weighted sums of both losses, and which drafts were right; the (rows, V)
        logits are made a chunk at a time, and again in the backward."""
        shape = blocks.labels.shape
        # Rows that count for nothing need no logits.
        chosen = blocks.counts.flatten().nonzero().squeeze(1)
        weights = (self.weights * blocks.counts).flatten()[chosen]
        labels = blocks.labels.flatten()[chosen]
        hidden = predicting.flatten(0, 2)[chosen]
        bottleneck = None if inner is None else inner.flatten(0, 2)[chosen]
        base = final = hidden.new_zeros(())
        right = [torch.zeros(shape, dtype=torch.bool, device=hidden.device).flatten()]
        right.append(right[0].clone())
        for first in range(0, len(chosen), self.loss_rows):
            part = slice(first, first + self.loss_rows)
            chunk = checkpoint(
                self._chunk,
                hidden[part],
                None if bottleneck is None else bottleneck[part],
                labels[part],
                weights[part],
                lm_head,
                use_reentrant=False,
            )
            base, final = base + chunk[0], final + chunk[1]
            right[0][chosen[part]] = chunk[2]
            right[1][chosen[part]] = chunk[3]
        return base, final, right[0].view(shape), right[1].view(shape)

    def _chunk(
        self,
        hidden: torch.Tensor,
        bottleneck: torch.Tensor | None,
        labels: torch.Tensor,
        weights: torch.Tensor,
        lm_head: nn.Module,
    ) -> tuple[torch.Tensor, ...]:
        base = lm_head(hidden)
        final = base
        if bottleneck is not None:
            final = base + F.linear(bottleneck, self.draft.embed_proj[2].weight)
        losses = []
        for logits in (base, final):
            # In float32 at least: bfloat16 logits lose the differences that matter.
            logits = logits if logits.dtype == torch.float64 else logits.float()
            entropy = F.cross_entropy(logits, labels, reduction="none")
            losses.append((entropy * weights).sum())
        return (*losses, base.argmax(-1) == labels, final.argmax(-1) == labels)


def _acceptance(right: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Mean acceptance length over the blocks that have a first label."""
    accepted = (right & counts).long().cumprod(-1).sum(-1)
    started = counts[..., 0]
    return 1 + (accepted * started).sum() / started.sum().clamp(min=1)
