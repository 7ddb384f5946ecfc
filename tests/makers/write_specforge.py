# SPDX-License-Identifier: Apache-2.0
"""SpecForge's checkpoint, now and as it was while the head lay under ``logit_head``.

SpecForge still reads that older layout, which is how it is checked here.
"""

import shutil

import torch
from safetensors.torch import load_file, save_file
from specforge.modeling.draft.domino import DominoDraftModel
from transformers import Qwen3Config

from tests.makers import common

# Both layouts of the labels, one in each folder.
_HEAD = ("prefix_gru", "embed_proj")
NEW, OLD = common.DATA / "specforge", common.DATA / "specforge-logit-head"


def main() -> None:
    target = common.load_target()
    for folder, shift_label in ((NEW, True), (OLD, False)):
        config = target.config.to_dict() | common.BACKBONE
        config.pop("layer_types")
        section = common.HEAD | {
            "shift_label": shift_label,
            "mask_token_id": common.MASK_TOKEN_ID,
            "target_layer_ids": common.TARGET_LAYER_IDS,
        }
        config = Qwen3Config(
            **config | {"architectures": ["DominoDraftModel"]},
            block_size=common.BLOCK_SIZE,
            num_target_layers=target.config.num_hidden_layers,
            dflash_config=section,
        )
        config._attn_implementation = "eager"
        model = DominoDraftModel(config).float().eval()
        common.fill(model, seed=int(shift_label))
        shutil.rmtree(folder, ignore_errors=True)
        model.bfloat16().save_pretrained(folder)
        if folder == OLD:
            weights = folder / "model.safetensors"
            tensors = {
                f"logit_head.{name}" if name.startswith(_HEAD) else name: tensor
                for name, tensor in load_file(weights).items()
            }
            save_file(tensors, weights, metadata={"format": "pt"})
        # From the files alone, by SpecForge's own reading of the names.
        loaded = DominoDraftModel(config).float().eval()
        loaded.load_state_dict(load_file(folder / "model.safetensors"))

        def draft(
            context: list[int], bonus: int, model: DominoDraftModel = loaded
        ) -> list[int]:
            block = common.block_of(bonus)
            with torch.no_grad():
                hidden = model(
                    position_ids=torch.arange(len(context) + block.shape[1])[None],
                    noise_embedding=target.model.embed_tokens(block),
                    target_hidden=common.target_features(target, context),
                    is_causal=False,
                )
                tokens = model._sample_draft_tokens(target, hidden, block)
            return [int(token) for token in tokens[0]]

        common.write_expected(folder, ["specforge"], draft)


if __name__ == "__main__":
    main()
