# SPDX-License-Identifier: Apache-2.0
"""SpecForge: a class of its own, and an older nesting of the head's tensors."""

from vllm_domino.makers.layout import (
    DOMINO_PROJECTOR,
    Maker,
    architectures,
    write_flat,
)

# "DFlashDominoDraftModel" is what vLLM makes of it, for its own purposes.
ARCHITECTURES = ("DominoDraftModel", "DFlashDominoDraftModel")

SPECFORGE = Maker(
    name="specforge",
    title="SpecForge",
    claims=lambda raw: any(name in ARCHITECTURES for name in architectures(raw)),
    implied_projector=DOMINO_PROJECTOR,
    defaults={"shift_label": False, "pure_draft_prefix_len": 0},
    prefixes=(
        ("logit_head.prefix_gru.", "prefix_gru."),
        ("logit_head.embed_proj.", "embed_proj."),
    ),
    write=lambda draft, backbone, target: write_flat(draft, backbone, ARCHITECTURES[0]),
)
