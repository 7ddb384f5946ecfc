# SPDX-License-Identifier: Apache-2.0
"""The released drafts (Huang2020/Qwen3-8B-Domino-b16 and kin), and what we train.

They share plain DFlash's architecture; only ``projector_type`` tells them apart.
"""

from vllm_domino.makers.layout import Maker, architectures, write_flat

ARCHITECTURE = "DFlashDraftModel"

RELEASED = Maker(
    name="released",
    title="released drafts",
    claims=lambda raw: ARCHITECTURE in architectures(raw),
    write=lambda draft, backbone, target: write_flat(draft, backbone, ARCHITECTURE),
)
