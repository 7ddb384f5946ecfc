# SPDX-License-Identifier: Apache-2.0
"""speculators: the backbone's config nested, the head under ``domino_head.``, often a
reduced vocabulary, and the target's name inside.

Domino is a pull request there (speculators#773), not a release: this is its layout as
of mid 2026. Target layers are numbered as Transformers numbers hidden states, where 0
is the embedding, so one more than everywhere else.
"""

from typing import Any

from vllm_domino.config import DraftConfig
from vllm_domino.makers.layout import DOMINO_PROJECTOR, MISSING, Maker, look_up

NESTED = "transformer_layer_config"
VERIFIER = "speculators_config.verifier.name_or_path"
_LAYER_IDS = "aux_hidden_state_layer_ids"
_OUTSIDE = (
    "block_size",
    "mask_token_id",
    "draft_vocab_size",
    "shift_label",
    "pure_draft_prefix_len",
    "emb_dim",
    "gru_hidden_dim",
)
_HEAD = (
    ("domino_head.prefix_gru.", "prefix_gru."),
    ("domino_head.embed_proj.", "embed_proj."),
)


def _from_embedding(fields: dict[str, Any]) -> None:
    ids = fields.get("target_layer_ids")
    if isinstance(ids, list) and all(type(layer) is int for layer in ids):
        fields["target_layer_ids"] = [layer - 1 for layer in ids]


def _write(draft: DraftConfig, backbone: dict[str, Any], target: str) -> dict[str, Any]:
    fields = draft.model_dump(mode="json", exclude_none=True)
    ids = fields.pop("target_layer_ids")
    fields.pop("num_target_layers", None)
    outside = {name: fields.pop(name) for name in _OUTSIDE if name in fields}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "projector_type": DOMINO_PROJECTOR,
        NESTED: _backbone_only(backbone) | fields | {"model_type": "qwen3"},
        _LAYER_IDS: [layer + 1 for layer in ids],
        "sample_from_anchor": draft.shift_label,
        # Every layer sees the whole block; vLLM reads it from this.
        "sliding_window_non_causal": True,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": draft.max_drafts}
            ],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "draft_vocab_size": draft.drafted_vocab,
        **outside,
    }


def _backbone_only(fields: dict[str, Any]) -> dict[str, Any]:
    """Without what a flat layout keeps among them."""
    other = {"architectures", *_OUTSIDE}
    return {key: value for key, value in fields.items() if key not in other}


SPECULATORS = Maker(
    name="speculators",
    title="speculators",
    claims=lambda raw: look_up(raw, NESTED) is not MISSING,
    paths={
        **{name: (f"{NESTED}.{name}",) for name in DraftConfig.model_fields},
        **{name: (name,) for name in _OUTSIDE},
        "target_layer_ids": (_LAYER_IDS,),
    },
    nested=NESTED,
    marks={
        "speculators_model_type": "dflash",
        "speculators_config.algorithm": "dflash",
    },
    projector="projector_type",
    prefixes=_HEAD,
    written_prefixes=_HEAD,
    adjust=_from_embedding,
    write=_write,
)
