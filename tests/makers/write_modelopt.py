# SPDX-License-Identifier: Apache-2.0
"""Model-Optimizer's checkpoint: its conversion of the target, its exporter."""

import shutil

import modelopt.torch.speculative as mtsp
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from tests.makers import common

FOLDER = common.DATA / "modelopt"


def main() -> None:
    model, target = common.load_target(), common.load_target()
    mtsp.convert(
        model,
        [
            (
                "dflash",
                {
                    "dflash_block_size": common.BLOCK_SIZE,
                    "dflash_mask_token_id": common.MASK_TOKEN_ID,
                    "dflash_use_torch_compile": False,
                    "dflash_architecture_config": common.BACKBONE
                    | common.HEAD
                    | {
                        "mask_token_id": common.MASK_TOKEN_ID,
                        "target_layer_ids": common.TARGET_LAYER_IDS,
                        # Under Transformers 5 its draft otherwise rotates by 10,000,
                        # while its export says what the target rotates by.
                        "rope_parameters": target.config.rope_parameters,
                    },
                },
            )
        ],
    )
    model = model.float().eval()
    common.fill(model.dflash_module, seed=3)
    # It would make this itself, by a signature that this Transformers no longer has.
    module = model.dflash_module
    module.rotary_emb = Qwen3RotaryEmbedding(config=module._rotary_config)
    layers = list(model.target_layer_ids)
    assert layers == common.TARGET_LAYER_IDS, layers

    def draft(context: list[int], bonus: int) -> list[int]:
        block = common.block_of(bonus)
        with torch.no_grad():
            hidden = model.dflash_module(
                noise_embedding=target.model.embed_tokens(block),
                target_hidden=common.target_features(target, context),
                position_ids=torch.arange(len(context) + common.BLOCK_SIZE)[None],
                attention_mask=None,
            )
            base = target.lm_head(hidden)

        def scores(tokens: torch.Tensor) -> torch.Tensor:
            anchor = torch.zeros(1, 1, dtype=torch.long)
            final: torch.Tensor = model._apply_domino_head(
                hidden, base, tokens, anchor, 1
            )
            return final[0]

        drafts: list[int] = common.roll_out(scores, bonus, common.BLOCK_SIZE)
        return drafts

    shutil.rmtree(FOLDER, ignore_errors=True)
    model.get_exporter().export(FOLDER, dtype=torch.bfloat16)
    common.write_expected(FOLDER, ["nvidia-modelopt"], draft)


if __name__ == "__main__":
    main()
