# SPDX-License-Identifier: Apache-2.0
"""The base-anchored curriculum (arXiv 2605.29707): first the backbone alone learns to
draft, then, step by step, the head on top of it."""

import torch

from vllm_domino.training.recipe import Recipe


def base_weight(recipe: Recipe, step: int) -> float:
    """lambda at a step: from ``lambda_start`` to 0 in a line, then 0."""
    decay_steps = recipe.decay_ratio * recipe.steps
    if step >= decay_steps:
        return 0.0
    return recipe.lambda_start * (1 - step / decay_steps)


def position_weights(recipe: Recipe, num_drafts: int) -> torch.Tensor:
    """(K,) weights of the drafts' losses, 1 for the first and falling."""
    return torch.exp(-torch.arange(num_drafts, dtype=torch.float32) / recipe.gamma)


def learning_rate_factor(recipe: Recipe, step: int) -> float:
    """Linear warm-up, then a cosine to 0."""
    warmup = recipe.warmup_ratio * recipe.steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1.0, recipe.steps - warmup)
    return float(0.5 * (1 + torch.cos(torch.tensor(torch.pi * progress))))
