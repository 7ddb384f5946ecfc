# SPDX-License-Identifier: Apache-2.0
"""A picture of a training run, from its metrics."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def read_metrics(path: Path) -> dict[str, list[float]]:
    """Each metric's values by name; ``step`` is one of them."""
    rows: list[dict[str, Any]] = [json.loads(s) for s in path.read_text().splitlines()]
    return {name: [row[name] for row in rows] for name in rows[0]}


def plot_run(metrics: Path, picture: Path) -> None:
    """Losses with the curriculum's lambda, and acceptance lengths, over the steps."""
    values = read_metrics(metrics)
    figure, (losses, acceptance) = pyplot.subplots(1, 2, figsize=(10, 4))
    steps = values["step"]
    losses.plot(steps, values["base"], label="base loss")
    losses.plot(steps, values["final"], label="final loss")
    losses.set(xlabel="step", ylabel="cross-entropy, weighted by position")
    weight = losses.twinx()
    weight.plot(steps, values["base_weight"], color="grey", linestyle=":")
    weight.set(ylabel="lambda (dotted)", ylim=(0, 1.05))
    losses.legend()
    acceptance.plot(steps, values["base_acceptance"], label="base logits")
    acceptance.plot(steps, values["final_acceptance"], label="corrected logits")
    acceptance.set(xlabel="step", ylabel="acceptance length, teacher-forced")
    acceptance.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
