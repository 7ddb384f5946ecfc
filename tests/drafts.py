# SPDX-License-Identifier: Apache-2.0
"""Makes drafts for the tests: random ones, plain DFlash ones, and broken ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm_domino.checkpoint import backbone_shapes, head_shapes
from vllm_domino.makers import read

Edit = Callable[[dict[str, Any]], None]
TensorEdit = Callable[[dict[str, torch.Tensor]], None]


def read_config(draft: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((draft / "config.json").read_text())
    return config


def copy_draft(
    source: Path,
    folder: Path,
    edit: Edit | None = None,
    edit_tensors: TensorEdit | None = None,
) -> Path:
    """A copy of a draft with its config.json or its tensors changed."""
    shutil.copytree(source, folder)
    if edit is not None:
        config = read_config(source)
        edit(config)
        (folder / "config.json").write_text(json.dumps(config))
    if edit_tensors is not None:
        tensors = load_file(source / "model.safetensors")
        edit_tensors(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def random_unshifted_draft(like: Path, folder: Path, seed: int = 7) -> Path:
    """A ``shift_label: false``, prefix 0 draft in the released layout, in shards."""
    config = read_config(like)
    config["architectures"] = ["DFlashDraftModel"]
    config["dflash_config"] |= {"shift_label": False, "pure_draft_prefix_len": 0}
    shapes = read(config, str(folder))[0]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in (head_shapes(shapes) | backbone_shapes(shapes)).items():
        # Norm weights differ by layer, so that one used for another shows.
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.5
        noise = torch.randn(shape, generator=generator) * scale
        tensors[name] = noise if len(shape) > 1 else 1 + noise
    # Loud enough that the correction decides most tokens.
    tensors["embed_proj.2.weight"] *= 12
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    _save_sharded(tensors, folder)
    return folder


def _save_sharded(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    names = sorted(tensors)
    shards = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, held in shards.items():
        save_file(
            {n: tensors[n] for n in held}, folder / file, metadata={"format": "pt"}
        )
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": {n: file for file, held in shards.items() for n in held},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def plain_dflash_draft(like: Path, folder: Path) -> Path:
    """A DFlash draft without a head, from a Domino one's backbone."""

    def without_head(config: dict[str, Any]) -> None:
        config["architectures"] = ["DFlashDraftModel"]
        section = config["dflash_config"]
        config["dflash_config"] = {
            name: section[name] for name in ("mask_token_id", "target_layer_ids")
        }

    def drop_head(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.startswith(("prefix_gru", "embed_proj"))]:
            del tensors[name]

    return copy_draft(like, folder, without_head, drop_head)


def reduced_vocab_draft(like: Path, target: Path, folder: Path) -> Path:
    """A trained draft that can draft only some tokens: printable ASCII and newline."""
    kept = torch.tensor([10, *range(32, 127)])

    def shrink(config: dict[str, Any]) -> None:
        config["draft_vocab_size"] = len(kept)

    def select(tensors: dict[str, torch.Tensor]) -> None:
        lm_head = load_file(target / "model.safetensors")["lm_head.weight"]
        tensors["lm_head.weight"] = lm_head[kept]
        tensors["embed_proj.2.weight"] = tensors["embed_proj.2.weight"][kept]
        tensors["d2t"] = kept - torch.arange(len(kept))

    return copy_draft(like, folder, shrink, select)
