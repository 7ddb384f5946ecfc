# SPDX-License-Identifier: Apache-2.0
"""A Domino draft's backbone as a DFlash draft of vLLM's own, to time one against the
other: the same layers, without the head.

    python bench/headless.py pairs/demo/domino FOLDER

Its drafts are poor where the Domino draft was trained with ``shift_label``: vLLM's
DFlash reads the rows one place later. Only its steps' time is of interest.
"""

import json
import sys
from pathlib import Path

from safetensors.torch import save_file

from vllm_domino.checkpoint import HEAD_PREFIXES
from vllm_domino.draft import Draft


def main() -> None:
    source, folder = sys.argv[1], Path(sys.argv[2])
    draft = Draft.open(source)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.contiguous()
        for name, tensor in draft.tensors()
        if not name.startswith(HEAD_PREFIXES)
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    section = {
        "mask_token_id": draft.config.mask_token_id,
        "target_layer_ids": list(draft.config.target_layer_ids),
    }
    config = draft.raw | {
        "architectures": ["DFlashDraftModel"],
        "block_size": draft.config.max_drafts + 1,
        "dflash_config": section,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
