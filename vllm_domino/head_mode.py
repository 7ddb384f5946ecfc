# SPDX-License-Identifier: Apache-2.0
"""From what a user chose (``RuntimeConfig.head``) to the rollout that does it."""

import torch

from vllm_domino.config import RuntimeConfig
from vllm_domino.exact import Exact
from vllm_domino.rollouts import Rollout, StepByStep
from vllm_domino.scoring import GUESSES, POOL, Dense, Pool
from vllm_domino.steps import Steps


def make_rollout(
    runtime: RuntimeConfig,
    steps: Steps,
    captured: bool,
    alone: bool,
    table: torch.Tensor | None = None,
) -> Rollout:
    """The rollout that a user's choice means.

    Args:
        captured: Whether the draft step goes into a CUDA graph.
        alone: Whether this rank's ids are the target's.
        table: (V, H) the target's embedding, where this rank has all of it.
    """
    if runtime.head == "pool":
        return StepByStep(steps, Pool(steps.vocab, runtime.pool_size or POOL))
    if runtime.head == "dense":
        return StepByStep(steps, Dense(steps.vocab))
    guesses = runtime.pool_size or GUESSES
    if runtime.head == "exact" and guesses >= len(steps.vocab):
        return StepByStep(steps, Dense(steps.vocab))
    if steps.vocab.device.type == "cpu" and not captured and runtime.head == "exact":
        return Exact(steps, guesses, foresees=alone)
    # Triton may not be there where nobody asks for it.
    from vllm_domino.fused import FusedDense, FusedExact, FusedSteps

    fused = FusedSteps(steps, table)
    if runtime.head == "exact":
        return FusedExact(fused, guesses)
    return StepByStep(fused, FusedDense(steps.vocab))
