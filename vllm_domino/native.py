# SPDX-License-Identifier: Apache-2.0
"""``dense`` for small heads on a CPU, a block a call: native.cpp.

A small head's weights stay in a core's cache, so what takes the time in torch is torch
itself: a hundred operations a block, some microseconds each, for arithmetic of a tenth
of that. torch's compiler takes half as long as torch, this a fifth.

It is compiled once a machine, in seconds, by what torch's own compiler keeps for that,
which also knows the CPU's instructions.
"""

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

from vllm_domino.rollouts import Choose
from vllm_domino.steps import Steps

logger = logging.getLogger("vllm.domino")

# Above it weights are read from memory, and torch's products are as good.
_MOST_BYTES = 2**25


class _Head(ctypes.Structure):
    """``Head`` of native.cpp."""

    _fields_ = [
        ("gates", ctypes.c_void_p),
        ("joint", ctypes.c_void_p),
        ("vocab", ctypes.c_void_p),
        ("gru", ctypes.c_int64),
        ("bottleneck", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("prefix", ctypes.c_int64),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """native.cpp, compiled; None if that cannot be done here."""
    source = Path(__file__).with_suffix(".cpp").read_text()
    try:
        from torch._inductor.codecache import CppCodeCache

        loaded: ctypes.CDLL = CppCodeCache.load(source)
        loaded.draft.restype = None
    except Exception as error:  # a compiler fails in many ways
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        logger.warning(
            "Domino: native.cpp cannot be compiled (%s), so a small head drafts the "
            "same tokens by torch, a few percent slower. Install g++, or set CXX to a "
            "C++ compiler.",
            reason,
        )
        return None
    return loaded


def misfit(steps: Steps, table: torch.Tensor | None) -> str | None:
    """Why a head cannot be drafted by native.cpp; None if it can.

    Args:
        table: (V, H) the target's embedding, where this rank has all of it.
    """
    if steps.vocab.device.type != "cpu" or steps.vocab.dtype != torch.float32:
        return "it is for float32 on a CPU"
    if table is None:
        return "no rank has the whole embedding as it is"
    gates, state = steps.gru_weights[1].shape
    size = steps.vocab.nbytes + len(table) * gates * table.element_size()
    if size > _MOST_BYTES:
        return f"it is for heads of up to {_MOST_BYTES >> 20} MiB"
    if (loaded := library()) is None:
        return "it cannot be compiled"
    lanes = loaded.lanes()
    if state % lanes or steps.vocab.shape[1] % lanes:
        return f"gru_hidden_dim and emb_dim must be multiples of {lanes}"
    return None


class Native:
    """Drafts dense's tokens, for one rank that scores all of the target's tokens.

    The sums are torch's in another order, so two scores that are equal but for their
    last bits may change places.

    Args:
        steps: Of a head that is no ``misfit``.
        table: (V, H) the target's embedding.
    """

    def __init__(self, steps: Steps, table: torch.Tensor) -> None:
        loaded = library()
        assert loaded is not None
        self._draft = loaded.draft
        self.steps = steps
        gates = steps.gates
        if gates is None:
            gates = steps.head.project_embeddings(table)
        recurrent, tile = steps.gru_weights[1], loaded.tile()
        joint = torch.cat([recurrent, steps.state_weight])
        # Kept, for the library has no more than their addresses.
        self._weights = (
            gates.contiguous(),
            _tiled(joint, tile),
            _tiled(steps.vocab, tile),
        )
        vocab_size, bottleneck = steps.vocab.shape
        self._head = _Head(
            *(weight.data_ptr() for weight in self._weights),
            recurrent.shape[1],
            bottleneck,
            vocab_size,
            steps.prefix,
        )

    def draft(
        self,
        hidden: torch.Tensor,
        base_logits: torch.Tensor,
        bonus: torch.Tensor,
        choose: Choose,
    ) -> torch.Tensor:
        """See ``vllm_domino.rollouts.Rollout``; a rank alone has nothing to choose."""
        projected = self.steps.project_hidden(hidden).contiguous()
        base_logits = base_logits.contiguous()
        bonus = bonus.long().contiguous()
        drafts = bonus.new_empty(hidden.shape[:2])
        tensors = projected, base_logits, bonus, drafts
        self._draft(
            ctypes.byref(self._head),
            *(ctypes.c_int64(count) for count in drafts.shape),
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors),
        )
        return drafts


def _tiled(weight: torch.Tensor, tile: int) -> torch.Tensor:
    """(out, in) -> (tiles, in, tile), zeros below where the last is not full."""
    rows = -len(weight) % tile
    padded = F.pad(weight, (0, 0, 0, rows))
    return padded.unflatten(0, (-1, tile)).transpose(1, 2).contiguous()
