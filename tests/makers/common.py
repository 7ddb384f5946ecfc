# SPDX-License-Identifier: Apache-2.0
"""What the three writers share: one small geometry, the contexts, and the files.

Each writer runs in a scratch environment that has its maker's package (see README.md),
makes a draft with the maker's own classes, saves it as the maker does, and asks the
maker's own modules for a block at every position of three answers of ``pairs/bytes4``.
"""

import json
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parent.parent.parent
TARGET = ROOT / "pairs" / "bytes4" / "target"
DATA = Path(__file__).parent / "data"
EXPECTED = "expected.json"

REQUESTS = (0, 3, 7)  # of the pair's prompts
ANSWER_TOKENS = 12

BLOCK_SIZE = 6
LAYERS = 2
TARGET_LAYER_IDS = [0, 2]
MASK_TOKEN_ID = 287
PURE_DRAFT_PREFIX_LEN = 1
EMB_DIM = 16
GRU_HIDDEN_DIM = 32
# What differs from the target's own config.
BACKBONE = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 64,
}
HEAD = {
    "projector_type": "domino",
    "shift_label": True,
    "pure_draft_prefix_len": PURE_DRAFT_PREFIX_LEN,
    "emb_dim": EMB_DIM,
    "gru_hidden_dim": GRU_HIDDEN_DIM,
}

# Tokens of a block so far, bonus first -> corrected logits of its rows, (Q, V).
Scores = Callable[[torch.Tensor], torch.Tensor]


def load_target() -> Any:
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@torch.no_grad()
def fill(module: torch.nn.Module, seed: int) -> None:
    """Weights that bfloat16 holds exactly, norms that differ by layer, and a correction
    loud enough to decide most tokens."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(module.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            value = 1 + noise * 0.5
        else:
            loudness = 3 if name.endswith("embed_proj.2.weight") else 1
            value = noise * parameter.shape[-1] ** -0.5 * loudness
        parameter.copy_(value.bfloat16().to(parameter.dtype))


def contexts() -> Iterator[tuple[int, list[int], int]]:
    """(which request, context, bonus) at every position that is drafted from."""
    pair = TARGET.parent
    prompts = json.loads((pair / "prompts.json").read_text())
    golden = json.loads((pair / "golden.json").read_text())
    for request in REQUESTS:
        prompt = prompts[request]
        sequence = prompt + golden["outputs"][request][:ANSWER_TOKENS]
        for length in range(len(prompt), len(sequence)):
            yield request, sequence[:length], sequence[length]


@torch.no_grad()
def target_features(target: Any, context: list[int]) -> torch.Tensor:
    """(1, C, layers * H) of the layers that the draft reads."""
    states = target(torch.tensor([context]), output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1] for i in TARGET_LAYER_IDS], dim=-1)


def block_of(bonus: int) -> torch.Tensor:
    return torch.tensor([[bonus] + [MASK_TOKEN_ID] * (BLOCK_SIZE - 1)])


@torch.no_grad()
def roll_out(scores: Scores, bonus: int, num_drafts: int) -> list[int]:
    """Greedy drafts from a maker's head that scores a whole block at once: each pass
    is given the tokens picked so far, and only its next row is used."""
    block = block_of(bonus)
    drafts: list[int] = []
    for i in range(num_drafts):
        token = int(scores(block)[i].argmax())
        drafts.append(token)
        if i + 1 < BLOCK_SIZE:
            block[0, i + 1] = token
    return drafts


def write_expected(
    folder: Path, packages: list[str], draft: Callable[[list[int], int], list[int]]
) -> None:
    blocks = [
        {"request": request, "context": len(context), "draft": draft(context, bonus)}
        for request, context, bonus in contexts()
    ]
    made_by = {name: version(name) for name in [*packages, "torch", "transformers"]}
    lines = ",\n".join(json.dumps(block) for block in blocks)
    (folder / EXPECTED).write_text(
        f'{{"made_by": {json.dumps(made_by)},\n"blocks": [\n{lines}\n]}}\n'
    )
    sys.stdout.write(f"{folder}: {len(blocks)} blocks, made by {made_by}\n")
