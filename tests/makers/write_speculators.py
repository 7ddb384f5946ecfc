# SPDX-License-Identifier: Apache-2.0
"""A checkpoint in speculators' layout, with a reduced vocabulary.

No release of speculators has Domino yet. The backbone, its config and its files are the
published package's DFlash; the head and its fields are added as pull request 773 lays
them out, and computed with ``torch.nn`` alone.
"""

import json
import shutil
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import nn
from transformers import Qwen3Config

from tests.makers import common

FOLDER = common.DATA / "speculators"
# Printable ASCII and newline, which is nearly all the target says.
KEPT = torch.tensor([10, *range(32, 127)])


class Head(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.prefix_gru = nn.GRU(
            width, common.GRU_HIDDEN_DIM, batch_first=True, bias=False
        )
        self.embed_proj = nn.Sequential(
            nn.Linear(width + common.GRU_HIDDEN_DIM, common.EMB_DIM, bias=False),
            nn.SiLU(),
            nn.Linear(common.EMB_DIM, len(KEPT), bias=False),
        )


def main() -> None:
    target = common.load_target()
    backbone = target.config.to_dict() | common.BACKBONE
    backbone["layer_types"] = ["full_attention"] * common.LAYERS
    backbone = Qwen3Config(**backbone)
    backbone._attn_implementation = "eager"
    verifier = VerifierConfig(
        name_or_path=str(common.TARGET.relative_to(common.ROOT)),
        architectures=["Qwen3ForCausalLM"],
    )
    config = DFlashSpeculatorConfig(
        transformer_layer_config=backbone,
        draft_vocab_size=len(KEPT),
        block_size=common.BLOCK_SIZE,
        # Numbered as hidden states are, the embedding first.
        aux_hidden_state_layer_ids=[layer + 1 for layer in common.TARGET_LAYER_IDS],
        mask_token_id=common.MASK_TOKEN_ID,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[
                GreedyTokenProposalConfig(speculative_tokens=common.BLOCK_SIZE - 1)
            ],
            default_proposal_method="greedy",
            verifier=verifier,
        ),
    )
    model = DFlashDraftModel(config).float().eval()
    head = Head(backbone.hidden_size).eval()
    common.fill(model, seed=5)
    common.fill(head, seed=6)
    chosen = torch.zeros(backbone.vocab_size, dtype=torch.bool)
    chosen[KEPT] = True
    model.load_vocab_mappings(chosen, KEPT - torch.arange(len(KEPT)))
    with torch.no_grad():
        kept = target.lm_head.weight[KEPT].bfloat16().float()
        model.lm_head.weight.copy_(kept)

    shutil.rmtree(FOLDER, ignore_errors=True)
    model.bfloat16().save_pretrained(FOLDER)
    (FOLDER / "config.py").unlink()  # speculators' own code, which it copies there
    _add_head(head)

    # From the files alone.
    model = DFlashDraftModel(config).float().eval()
    tensors = load_file(FOLDER / "model.safetensors")
    own = {n: t for n, t in tensors.items() if not n.startswith("domino_head.")}
    left = model.load_state_dict(own, strict=False)
    assert not left.unexpected_keys, left
    ids = torch.arange(len(KEPT)) + tensors["d2t"]

    def draft(context: list[int], bonus: int) -> list[int]:
        rows = _rows(model, target, context, bonus)

        def scores(tokens: torch.Tensor) -> torch.Tensor:
            states, _ = head.prefix_gru(target.model.embed_tokens(tokens))
            logits = model.lm_head(rows)[0]
            delta = head.embed_proj(torch.cat([rows, states], dim=-1))[0]
            delta[: common.PURE_DRAFT_PREFIX_LEN] = 0
            whole = torch.full((len(logits), backbone.vocab_size), -torch.inf)
            whole[:, ids] = logits + delta
            return whole

        drafts: list[int] = common.roll_out(scores, bonus, common.BLOCK_SIZE)
        return drafts

    common.write_expected(FOLDER, ["speculators"], draft)


@torch.no_grad()
def _rows(model: Any, target: Any, context: list[int], bonus: int) -> torch.Tensor:
    """The block's rows, (1, Q, H), through speculators' own layers."""
    rows = target.model.embed_tokens(common.block_of(bonus))
    features = common.target_features(target, context)
    features = model.hidden_norm(model.fc(features))
    positions = torch.arange(len(context) + common.BLOCK_SIZE)[None]
    rotary = model.rotary_emb(rows, positions)
    for layer in model.layers:
        rows = layer(
            hidden_states=rows,
            target_hidden=features,
            attention_mask=None,
            position_ids=positions,
            use_cache=False,
            position_embeddings=rotary,
        )
    return model.norm(rows)


def _add_head(head: Head) -> None:
    weights = FOLDER / "model.safetensors"
    tensors = load_file(weights)
    for name, tensor in head.state_dict().items():
        tensors[f"domino_head.{name}"] = tensor.bfloat16()
    save_file(tensors, weights, metadata={"format": "pt"})
    path = FOLDER / "config.json"
    config = json.loads(path.read_text()) | {
        "projector_type": "domino",
        "shift_label": True,
        "pure_draft_prefix_len": common.PURE_DRAFT_PREFIX_LEN,
        "emb_dim": common.EMB_DIM,
        "gru_hidden_dim": common.GRU_HIDDEN_DIM,
    }
    path.write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    main()
