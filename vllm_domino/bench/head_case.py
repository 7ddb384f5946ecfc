# SPDX-License-Identifier: Apache-2.0
"""A head of a given size to measure: weights as a trained head's, blocks as a model's.

No trained head of Qwen3's size can be fetched here, so one is made. W2 has the spectrum
and the row norms of a trained one, stretched to its width; its scale is set so that the
correction changes the winner at a chosen part of the positions. The rest is random.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from vllm_domino.draft import Draft
from vllm_domino.head import DominoHead, HeadShape


class Size(NamedTuple):
    shape: HeadShape
    num_drafts: int
    prefix: int


# The released drafts' sizes: 16 query rows, of which SGLang drafts 15.
SIZES = {
    "qwen3-4b": Size(HeadShape(2560, 1024, 256, 151936), 15, 1),
    "qwen3-8b": Size(HeadShape(4096, 1024, 256, 151936), 15, 1),
    "bytes8": Size(HeadShape(256, 128, 64, 288), 7, 1),
    "bytes4": Size(HeadShape(128, 64, 32, 288), 7, 1),
}
_VOCAB_MATRIX = "embed_proj.2.weight"
_BASE_SPREAD = 3.0  # standard deviation of base logits
# Blocks to set the correction's scale by, and how near to come.
_TUNING_REQUESTS = 4
_TOLERANCE = 0.02


class Inputs(NamedTuple):
    hidden: torch.Tensor  # (B, K + 1, H)
    bonus: torch.Tensor  # (B,)


@dataclass
class HeadCase:
    """
    Attributes:
        embedding: (V, H) the target's.
        lm_head: (V, H) the target's.
        changed: At what part of the positions the correction changes the winner.
    """

    size: Size
    head: DominoHead
    embedding: torch.Tensor
    lm_head: torch.Tensor
    changed: float
    generator: torch.Generator

    def inputs(self, num_reqs: int) -> Inputs:
        shape = (num_reqs, self.size.num_drafts + 1, self.size.shape.hidden_size)
        hidden = torch.randn(shape, generator=self.generator)
        bonus = torch.randint(
            self.size.shape.vocab_size, (num_reqs,), generator=self.generator
        )
        return Inputs(hidden.to(self.lm_head.dtype), bonus)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B,) -> (B, H)."""
        return self.embedding[tokens]

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(B, K, V); the lm_head over the rows that predict."""
        rows = hidden[:, : self.size.num_drafts]
        # As one matrix, as vLLM has them: a CPU takes a slice of a batch a hundred
        # times slower in bfloat16 (7 s for 70 ms at Qwen3-8B's sizes).
        return F.linear(rows.flatten(0, 1), self.lm_head).unflatten(0, rows.shape[:2])


def make_case(
    size: Size, spectrum_of: Path, changed: float, dtype: torch.dtype, seed: int
) -> HeadCase:
    """
    Args:
        spectrum_of: A trained draft, whose W2 the made one is like.
        changed: Wanted part of positions whose winner the correction changes.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden, width, vocab = (
        size.shape.hidden_size,
        size.shape.emb_dim,
        size.shape.vocab_size,
    )
    head = DominoHead(size.shape, size.prefix).requires_grad_(False)
    for parameter in head.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    head.embed_proj[2].weight.copy_(
        _like_a_trained_one(spectrum_of, vocab, width, generator)
    )
    scale = _BASE_SPREAD * hidden**-0.5
    lm_head = torch.randn(vocab, hidden, generator=generator).mul_(scale).to(dtype)
    embedding = torch.randn(vocab, hidden, generator=generator).to(dtype)
    case = HeadCase(size, head.to(dtype), embedding, lm_head, 0.0, generator)
    _set_scale(case, changed)
    return case


def _like_a_trained_one(
    draft: Path, vocab: int, width: int, generator: torch.Generator
) -> torch.Tensor:
    """(V, E) with the singular values and the row norms of a trained W2.

    A wider one has the same energy in the same *part* of its directions, which is hard
    on pruning: in trained heads it keeps to about as many directions as a narrow one.
    """
    trained = dict(Draft.open(str(draft)).tensors())[_VOCAB_MATRIX].float()
    values = torch.linalg.svdvals(trained)
    place = torch.linspace(0, len(values) - 1, width)
    below = place.floor().long()
    above = (below + 1).clamp(max=len(values) - 1)
    spectrum = torch.lerp(values[below], values[above], place - below)
    turn = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
    made = (torch.randn(vocab, width, generator=generator) * spectrum) @ turn
    norms = trained.norm(dim=-1)
    drawn = norms[torch.randint(len(norms), (vocab,), generator=generator)]
    return F.normalize(made, dim=-1) * drawn[:, None]


def _set_scale(case: HeadCase, wanted: float) -> None:
    """Scales W2 so that the correction changes the winner as often as wanted."""
    weight = case.head.embed_proj[2].weight
    hidden, _ = case.inputs(_TUNING_REQUESTS)
    # In float32: a CPU is slow to find the largest of bfloat16 values.
    base = case.base_logits(hidden)[:, case.size.prefix :].float()
    winner = base.argmax(-1)
    projected = case.head.project_hidden(hidden[:, case.size.prefix : -1])
    state = torch.rand(
        *projected.shape[:-1], case.size.shape.gru_hidden_dim, generator=case.generator
    ).to(hidden.dtype)
    inner = case.head.bottleneck(projected, state * 2 - 1)
    delta = F.linear(inner, weight).float()
    low, high = -6.0, 6.0  # of the scale's logarithm, base 2
    for _ in range(12):
        middle = (low + high) / 2
        changed = (base + delta * 2**middle).argmax(-1) != winner
        case.changed = changed.float().mean().item()
        if abs(case.changed - wanted) < _TOLERANCE:
            break
        low, high = (middle, high) if case.changed < wanted else (low, middle)
    weight.mul_(2**middle)


# How often a mode reads each weight: its parts' names, and per block.
Reads = dict[str, float]


def weight_bytes(case: HeadCase) -> dict[str, float]:
    """Bytes of each weight."""
    hidden, gru, width, vocab = case.size.shape
    size = case.lm_head.element_size()
    return {
        "lm_head": size * vocab * hidden,
        "W2": size * vocab * width,
        "GRU input": size * 3 * gru * hidden,
        "GRU state": size * 3 * gru * gru,
        "W1 of z": size * width * hidden,
        "W1 of h": size * width * gru,
    }


def reads(case: HeadCase, whole: float, gru_input: float) -> Reads:
    """What a rollout reads, wherever it finds it, cache or memory.

    Args:
        whole: How often all of W2.
        gru_input: How often W_ih.
    """
    drafts = case.size.num_drafts
    return {
        "lm_head": 1,
        "W2": whole,
        "GRU input": gru_input,
        "GRU state": drafts - 1,
        "W1 of z": 1,
        "W1 of h": drafts - case.size.prefix,
    }


def bytes_read(case: HeadCase, found: Reads) -> float:
    sizes = weight_bytes(case)
    return sum(sizes[name] * times for name, times in found.items())


def bandwidth_ceiling(megabytes: int = 512, repeats: int = 7) -> float:
    """Bytes a second that this machine reads at best, measured on one large sum."""
    block = torch.ones(megabytes * 2**20 // 4)
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        block.sum()
        best = min(best, time.perf_counter() - start)
    return float(block.numel() * 4 / best)
