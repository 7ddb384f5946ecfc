# SPDX-License-Identifier: Apache-2.0
"""Which tensors a draft must have, and the check that it has just these.

vLLM's loader leaves a parameter that no tensor names as it was made, and drafts with
it; acceptance falls and nothing says why. So every name and shape is checked, from the
files' headers before an engine starts and again as the tensors arrive.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from vllm_domino.config import DraftConfig
from vllm_domino.errors import CheckpointError

Shape = tuple[int, ...]

HEAD_PREFIXES = ("prefix_gru.", "embed_proj.")
_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"


def head_shapes(config: DraftConfig) -> dict[str, Shape]:
    """Name and shape of each of the head's tensors."""
    hidden, gru = config.hidden_size, config.gru_hidden_dim
    return {
        # Three gates (reset, update, new) stacked, as torch.nn.GRU keeps them.
        "prefix_gru.weight_ih_l0": (3 * gru, hidden),
        "prefix_gru.weight_hh_l0": (3 * gru, gru),
        "embed_proj.0.weight": (config.emb_dim, hidden + gru),
        "embed_proj.2.weight": (config.drafted_vocab, config.emb_dim),
    }


def reduced_vocab_shapes(config: DraftConfig) -> dict[str, Shape]:
    """What a draft of a reduced vocabulary brings: its lm_head, and for each token that
    it can draft how far the target's id lies above its own."""
    if not config.has_reduced_vocab:
        return {}
    size = config.drafted_vocab
    return {"lm_head.weight": (size, config.hidden_size), "d2t": (size,)}


def backbone_shapes(config: DraftConfig) -> dict[str, Shape]:
    """Name and shape of each of the backbone's tensors."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, hidden * len(config.target_layer_ids)),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config.num_hidden_layers):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
            f"{attention}.q_proj.weight": (queries, hidden),
            f"{attention}.k_proj.weight": (keys, hidden),
            f"{attention}.v_proj.weight": (keys, hidden),
            f"{attention}.o_proj.weight": (hidden, queries),
            f"{attention}.q_norm.weight": (config.head_dim,),
            f"{attention}.k_norm.weight": (config.head_dim,),
            f"{mlp}.gate_proj.weight": (inner, hidden),
            f"{mlp}.up_proj.weight": (inner, hidden),
            f"{mlp}.down_proj.weight": (hidden, inner),
        }
        if config.attention_bias:
            shapes |= {
                f"{attention}.q_proj.bias": (queries,),
                f"{attention}.k_proj.bias": (keys,),
                f"{attention}.v_proj.bias": (keys,),
                f"{attention}.o_proj.bias": (hidden,),
            }
    return shapes


def optional_shapes(config: DraftConfig) -> dict[str, Shape]:
    """Tensors a draft may bring along; without them it uses the target's."""
    table = (config.vocab_size, config.hidden_size)
    if config.has_reduced_vocab:
        # t2d marks what d2t lists.
        return {"embed_tokens.weight": table, "t2d": (config.vocab_size,)}
    return {"embed_tokens.weight": table, "lm_head.weight": table}


def check_tensors(config: DraftConfig, found: Mapping[str, Shape], source: str) -> None:
    """Raises ``CheckpointError`` unless ``found`` is a whole draft and nothing else."""
    required = (
        head_shapes(config) | backbone_shapes(config) | reduced_vocab_shapes(config)
    )
    known = required | optional_shapes(config)
    if missing := sorted(required.keys() - found.keys()):
        raise CheckpointError(
            f"{source}: no tensor {_names(missing)} in the weights, but config.json "
            "calls for it. The download or the export is incomplete: fetch or export "
            "the draft again."
        )
    if extra := sorted(found.keys() - known.keys()):
        raise CheckpointError(
            f"{source}: tensor {_names(extra)} is not part of a Domino draft with "
            "this config.json, and leaving it out would change the drafts. Check that "
            "weights and config.json are from the same export."
        )
    for name, shape in found.items():
        if tuple(shape) != known[name]:
            raise CheckpointError(
                f"{source}: tensor {name!r} has shape {list(shape)}; config.json "
                f"calls for {list(known[name])}. Check that weights and config.json "
                "are from the same export."
            )


def target_token_ids(
    config: DraftConfig, d2t: torch.Tensor, source: str
) -> torch.Tensor:
    """The target's id of each token that a reduced vocabulary holds: (V_draft,).

    Raises:
        CheckpointError: An id lies outside the target's vocabulary, or comes twice.
    """
    ids = torch.arange(d2t.shape[0], device=d2t.device) + d2t.long()
    if ids.min() < 0 or ids.max() >= config.vocab_size or len(ids.unique()) < len(ids):
        raise CheckpointError(
            f"{source}: tensor 'd2t' does not map the draft's {len(ids)} tokens to as "
            f"many of the target's {config.vocab_size}: ids are {int(ids.min())} to "
            f"{int(ids.max())}, {len(ids.unique())} of them distinct. Export the draft "
            "again."
        )
    return ids


def check_folder(config: DraftConfig, folder: Path) -> None:
    """``check_tensors`` on a local checkpoint, from its safetensors headers alone."""
    found: dict[str, Shape] = {}
    for file in _weight_files(folder):
        found |= _read_header(file)
    check_tensors(config, found, str(folder))


def _weight_files(folder: Path) -> Iterator[Path]:
    index = folder / _INDEX_FILE
    if not index.is_file():
        if not (folder / _SINGLE_FILE).is_file():
            raise CheckpointError(
                f"{folder}: neither {_SINGLE_FILE} nor {_INDEX_FILE} is there. A "
                "Domino draft is read from safetensors only: export it as such."
            )
        yield folder / _SINGLE_FILE
        return
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{index}: not a safetensors index ({error}). Fetch or export the draft "
            "again."
        ) from None
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{index} names {name!r}, which is not there. The download is "
                "incomplete: fetch the draft again."
            )
        yield folder / name


def _read_header(file: Path) -> dict[str, Shape]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return {
                name: tuple(tensors.get_slice(name).get_shape())
                for name in tensors.keys()  # noqa: SIM118 - not a mapping
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file}: not a whole safetensors file ({error}). The download or the "
            "export was cut short: fetch or export the draft again."
        ) from None


def _names(names: list[str], shown: int = 3) -> str:
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(map(repr, names[:shown])) + rest
