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
    guesses = runtime.pool_size or GUESSES
    mode = runtime.head or (_fastest_on_cpu(steps) if on_cpu else "dense")
    if mode == "exact" and guesses >= len(steps.vocab):
        mode = "dense"
    if mode == "fused" and on_cpu:
        reason = misfit(steps, table) if alone else "the vocabulary is not whole"
        if reason is None:
            assert table is not None
            return mode, Native(steps, table)
        if runtime.head is not None:
            logger.warning('Domino: head "fused" drafts as "dense": %s', reason)
        mode = "dense"
    if mode == "dense":
        return mode, StepByStep(steps, Dense(steps.vocab))
    if mode == "pool":
        return mode, StepByStep(steps, Pool(steps.vocab, runtime.pool_size or POOL))
    if on_cpu:
        return mode, Exact(steps, guesses, foresees=alone)
    # Triton may not be there where nobody asks for it.
    from vllm_domino.fused import FusedDense, FusedExact, FusedSteps

    fused = FusedSteps(steps, table)
    if mode == "exact":
        return mode, FusedExact(fused, guesses)
    return mode, StepByStep(fused, FusedDense(steps.vocab))


def _fastest_on_cpu(steps: Steps) -> HeadMode:
    """Of those that draft dense's tokens, where it fits."""
    large = steps.vocab.nbytes >= _LARGE_BYTES
    return "exact" if large and steps.vocab.dtype == torch.bfloat16 else "fused"
