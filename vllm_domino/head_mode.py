# SPDX-License-Identifier: Apache-2.0
"""From what a user chose (``RuntimeConfig.head``) to the rollout that does it."""

import logging

import torch

from vllm_domino.config import HeadMode, RuntimeConfig
from vllm_domino.exact import Exact
from vllm_domino.native import Native, misfit
from vllm_domino.rollouts import Rollout, StepByStep
from vllm_domino.scoring import GUESSES, POOL, Dense, Pool
from vllm_domino.steps import Steps

logger = logging.getLogger("vllm.domino")

# A W2 above it does not stay in a CPU's caches, so that reading it takes the time.
_LARGE_BYTES = 2**25


def make_rollout(
    runtime: RuntimeConfig,
    steps: Steps,
    captured: bool,
    alone: bool,
    table: torch.Tensor | None = None,
) -> tuple[HeadMode, Rollout]:
    """The rollout that a user's choice means, and what it is called.

    Args:
        captured: Whether the draft step goes into a CUDA graph.
        alone: Whether this rank's ids are the target's.
        table: (V, H) the target's embedding, where this rank has all of it.
    """
    on_cpu = steps.vocab.device.type == "cpu" and not captured
    mode = runtime.head or ("exact" if on_cpu and _is_large(steps) else "dense")
    if mode == "pool":
        return mode, StepByStep(steps, Pool(steps.vocab, runtime.pool_size or POOL))
    guesses = runtime.pool_size or GUESSES
    if mode == "exact" and guesses < len(steps.vocab):
        if on_cpu:
            return mode, Exact(steps, guesses, foresees=alone)
        # Triton may not be there where nobody asks for it.
        from vllm_domino.fused import FusedExact, FusedSteps

        return mode, FusedExact(FusedSteps(steps, table), guesses)
    if mode == "fused" and not on_cpu:
        from vllm_domino.fused import FusedDense, FusedSteps

        return mode, StepByStep(FusedSteps(steps, table), FusedDense(steps.vocab))
    if on_cpu and runtime.head in (None, "fused"):
        reason = misfit(steps, table) if alone else "the vocabulary is not whole"
        if reason is None:
            assert table is not None
            return "fused", Native(steps, table)
        if runtime.head is not None:
            logger.warning('Domino: head "fused" drafts as "dense": %s', reason)
    return "dense", StepByStep(steps, Dense(steps.vocab))


def _is_large(steps: Steps) -> bool:
    """Whether, on a CPU, ``exact`` is the fastest that drafts dense's tokens."""
    size: int = steps.vocab.nbytes
    return steps.vocab.dtype == torch.bfloat16 and size >= _LARGE_BYTES
