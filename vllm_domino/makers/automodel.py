# SPDX-License-Identifier: Apache-2.0
"""Automodel (nemo-automodel): a class of its own; some versions wrap it, and then every
tensor's name begins with ``model.``."""

from vllm_domino.makers.layout import Maker, architectures

ARCHITECTURE = "Qwen3DFlashDraftModel"

AUTOMODEL = Maker(
    name="automodel",
    title="Automodel",
    claims=lambda raw: ARCHITECTURE in architectures(raw),
    defaults={"shift_label": False, "pure_draft_prefix_len": 0},
    prefixes=(("model.", ""),),
)
