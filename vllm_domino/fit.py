# SPDX-License-Identifier: Apache-2.0
"""Whether a draft was made for a target."""

from dataclasses import dataclass

from vllm_domino.config import DraftConfig
from vllm_domino.errors import DraftConfigError


@dataclass(frozen=True)
class TargetShape:
    """What a target must agree in. ``name`` is its folder or hub id."""

    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int


def require_fit(config: DraftConfig, draft: str, target: TargetShape) -> None:
    """Raises ``DraftConfigError`` with the first thing that does not fit."""
    for field, found, wanted in (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if found != wanted:
            raise DraftConfigError(
                f"{draft}: {field} is {found}, but the target {target.name} has "
                f"{wanted}. A Domino draft shares its target's embedding and lm_head: "
                "use the target that it was trained for, or a draft of this target."
            )
    if (last := config.target_layer_ids[-1]) >= target.num_layers:
        raise DraftConfigError(
            f"{draft}: target_layer_ids asks for layer {last} (counted from 0), but "
            f"the target {target.name} has {target.num_layers} layers (0 to "
            f"{target.num_layers - 1}). Use the target that the draft was trained "
            "for, or a draft of this target."
        )
    if config.num_target_layers not in (None, target.num_layers):
        raise DraftConfigError(
            f"{draft}: it was trained for a target of {config.num_target_layers} "
            f"layers (num_target_layers), but {target.name} has {target.num_layers}. "
            "Use the target that the draft was trained for, or a draft of this target."
        )
