# SPDX-License-Identifier: Apache-2.0
"""Automodel's checkpoint: its draft class, its trainer's head, its checkpointer."""

import shutil
import tempfile
from pathlib import Path

import torch
from nemo_automodel.components.checkpoint.checkpointing import (
    Checkpointer,
    CheckpointingConfig,
)
from nemo_automodel.components.speculative.dflash.domino_core import DominoTrainerModule
from nemo_automodel.components.speculative.dflash.draft_qwen3 import (
    Qwen3DFlashDraftModel,
)
from transformers import Qwen3Config

from tests.makers import common

FOLDER = common.DATA / "automodel"


def main() -> None:
    target = common.load_target()
    # As its recipe derives it from the target's.
    config = target.config.to_dict() | common.BACKBONE
    config = Qwen3Config(
        **config
        | {
            "architectures": ["Qwen3DFlashDraftModel"],
            "layer_types": ["full_attention"] * common.LAYERS,
            "max_window_layers": common.LAYERS,
            "is_causal": False,
        },
        block_size=common.BLOCK_SIZE,
        num_target_layers=target.config.num_hidden_layers,
        dflash_config=common.HEAD
        | {
            "mask_token_id": common.MASK_TOKEN_ID,
            "target_layer_ids": common.TARGET_LAYER_IDS,
        },
    )
    config._attn_implementation = "eager"
    model = Qwen3DFlashDraftModel(config).float().eval()
    common.fill(model, seed=2)
    trainer = DominoTrainerModule(
        model,
        target.lm_head,
        target.model.embed_tokens,
        mask_token_id=common.MASK_TOKEN_ID,
        block_size=common.BLOCK_SIZE,
        attention_backend="eager",
        shift_label=True,
    )

    def draft(context: list[int], bonus: int) -> list[int]:
        block = common.block_of(bonus)
        with torch.no_grad():
            hidden = model(
                position_ids=torch.arange(len(context) + common.BLOCK_SIZE)[None],
                noise_embedding=target.model.embed_tokens(block),
                target_hidden=common.target_features(target, context),
                is_causal=False,
            )
            base = model.compute_logits(hidden, target.lm_head)[:, None]

        def scores(tokens: torch.Tensor) -> torch.Tensor:
            blocks = tokens[:, None]  # one anchor
            final: torch.Tensor = trainer._apply_domino_head(
                base, hidden[:, None], blocks, blocks
            )
            return final[0, 0]

        drafts: list[int] = common.roll_out(scores, bonus, common.BLOCK_SIZE)
        return drafts

    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    common.write_expected(FOLDER, ["nemo-automodel"], draft)
    _save(model.bfloat16())


def _save(model: Qwen3DFlashDraftModel) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        settings = CheckpointingConfig(
            enabled=True,
            checkpoint_dir=scratch,
            model_save_format="safetensors",
            model_repo_id=str(common.TARGET),
            model_cache_dir=scratch,
            save_consolidated=True,
            is_peft=False,
            model_state_dict_keys=list(model.state_dict()),
        )
        writer = Checkpointer(settings, dp_rank=0, tp_rank=0, pp_rank=0, moe_mesh=None)
        writer.save_model(model, f"{scratch}/step", is_final_checkpoint=True)
        for file in sorted(Path(scratch).rglob("consolidated/*")):
            if file.name == "config.json" or "safetensors" in file.name:
                shutil.copy(file, FOLDER)


if __name__ == "__main__":
    main()
