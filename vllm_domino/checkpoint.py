# SPDX-License-Identifier: Apache-2.0
"""Which tensors a draft must have, and the check that it has just these.

vLLM's loader leaves a parameter that no tensor names as it was made, and drafts with
it; acceptance falls and nothing says why. So every name, shape and value is checked,
in a folder before an engine starts, and again as the tensors arrive.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from vllm_domino.config import DraftConfig
from vllm_domino.errors import CheckpointError
from vllm_domino.makers.layout import Maker
from vllm_domino.weights import WeightFiles

Shape = tuple[int, ...]

HEAD_PREFIXES = ("prefix_gru.", "embed_proj.")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


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
    optional = {"embed_tokens.weight": table, "mask_embedding": (config.hidden_size,)}
    if config.has_reduced_vocab:
        # t2d marks what d2t lists.
        return optional | {"t2d": (config.vocab_size,)}
    return optional | {"lm_head.weight": table}


def check_tensors(
    config: DraftConfig, maker: Maker, found: Mapping[str, Shape], source: str
) -> None:
    """Raises ``CheckpointError`` unless ``found``, by our names, is a whole draft and
    nothing else."""
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
            f"this config.json (read as {maker.title}'s), and leaving it out would "
            "change the drafts. Check that weights and config.json are from the same "
            "export."
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


def check_folder(
    config: DraftConfig, maker: Maker, folder: Path, allow_pickle: bool = False
) -> None:
    """Reads a local checkpoint through, and raises unless it is whole and sound.

    Raises:
        CheckpointError: As ``check_tensors`` and ``check_values``.
    """
    source = str(folder)
    shapes: dict[str, Shape] = {}
    for name, tensor in WeightFiles.of(folder, allow_pickle).tensors():
        check_values(config, maker, name, tensor, source)
        if (ours := maker.ours(name)) in shapes:
            raise CheckpointError(
                f"{source}: tensor {ours!r} is there twice, once as {name!r}. Fetch or "
                "export the draft again."
            )
        shapes[ours] = tuple(tensor.shape)
    check_tensors(config, maker, shapes, source)


def check_values(
    config: DraftConfig, maker: Maker, name: str, tensor: torch.Tensor, source: str
) -> None:
    """Raises ``CheckpointError`` for a tensor of the wrong kind, or not finite."""
    ours = maker.ours(name)
    wanted = "bool" if ours == "t2d" else "integer" if ours == "d2t" else "float"
    if wanted != _kind(tensor.dtype):
        raise CheckpointError(
            f"{source}: tensor {name!r} holds {tensor.dtype} values; expected {wanted} "
            "ones. Export the draft again, unquantised."
        )
    if wanted == "float" and not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(
            f"{source}: tensor {name!r} holds values that are not finite (NaN or "
            "infinity). The training diverged or the file is damaged: use an earlier "
            "checkpoint, or fetch the draft again."
        )
    if ours == "d2t" and tensor.dim() == 1 and tensor.numel():
        target_token_ids(config, tensor, source)


def _kind(dtype: torch.dtype) -> str:
    if dtype in _FLOATS:
        return "float"
    if dtype == torch.bool:
        return "bool"
    return "integer" if not (dtype.is_floating_point or dtype.is_complex) else "other"


def _names(names: list[str], shown: int = 3) -> str:
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(map(repr, names[:shown])) + rest
