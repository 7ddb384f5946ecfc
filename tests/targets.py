# SPDX-License-Identifier: Apache-2.0
"""Small targets of other kinds than the pairs': random ones, a quantised one, and a
LoRA adapter for one."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

# As in pairs/bytes4, whose draft's sizes fit.
_SIZES: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "tie_word_embeddings": False,
}
# What the LoRA adapter changes.
ADAPTED = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
# Random weights of the usual size give near-ties; louder ones do not.
_LOUD = {"initializer_range": 0.2}


def llama(folder: Path) -> Path:
    return _save(LlamaForCausalLM, LlamaConfig(**_SIZES, **_LOUD), folder)


def qwen3_moe(folder: Path) -> Path:
    config = Qwen3MoeConfig(
        **_SIZES,
        **_LOUD,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    )
    return _save(Qwen3MoeForCausalLM, config, folder)


def gpt2(folder: Path) -> Path:
    """A target whose vLLM class hands out no hidden states."""
    config = GPT2Config(
        vocab_size=288, n_embd=128, n_layer=4, n_head=4, n_positions=1024
    )
    return _save(GPT2LMHeadModel, config, folder)


def _save(kind: type[PreTrainedModel], config: Any, folder: Path) -> Path:
    torch.manual_seed(11)
    kind(config).save_pretrained(folder)
    return folder


def quantised(target: Path, folder: Path) -> Path:
    """A target with int8 weights, as compressed-tensors writes them: one scale a row,
    activations quantised a token at a time."""
    shutil.copytree(target, folder)
    tensors = {}
    for name, weight in load_file(target / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": eight | {"strategy": "channel", "dynamic": False},
                "input_activations": eight | {"strategy": "token", "dynamic": True},
            }
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def lora_adapter(target: Path, folder: Path, rank: int = 8) -> Path:
    """A random adapter on attention and MLP, loud enough to change the text."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, weight in load_file(target / "model.safetensors").items():
        if name.split(".")[-2] not in ADAPTED:
            continue
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        rows, columns = weight.shape
        for part, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            noise = torch.randn(shape, generator=generator) * shape[1] ** -0.5
            tensors[f"{stem}.lora_{part}.weight"] = noise * 0.5
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(ADAPTED),
        "bias": "none",
        "base_model_name_or_path": str(target),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
