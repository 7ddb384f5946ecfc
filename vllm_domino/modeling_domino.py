# SPDX-License-Identifier: Apache-2.0
"""``DominoDraftModel``: a Domino (or plain DFlash) draft as a Transformers model.

It reads and writes the released layout (``config.json`` of a Qwen3 backbone with
``dflash_config``, head tensors at the top), which vLLM with this plugin, SGLang and
SpecForge load. It has no embedding and no lm_head: those are the target's.

Attention goes through Transformers' own switch, so ``attn_implementation`` may be
"eager", "sdpa", "flash_attention_2" or "flex_attention"; "xformers" is registered here.
"""

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModel,
    Cache,
    GenerationConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)

from vllm_domino.errors import CheckpointError, DraftConfigError
from vllm_domino.head import HeadShape, HeadSteps
from vllm_domino.makers import is_domino, maker_of, read
from vllm_domino.makers.layout import DOMINO_PROJECTOR, write_flat
from vllm_domino.makers.released import ARCHITECTURE as RELEASED_ARCHITECTURE

if TYPE_CHECKING:
    from vllm_domino.generation import SpecGenerateOutput

# Names on disk; what tells Domino from plain DFlash is dflash_config.projector_type.
RELEASED_MODEL_TYPE = "qwen3"


class DominoConfig(Qwen3Config):
    """A Qwen3 config with ``block_size`` and ``dflash_config``; see ``DraftConfig`` for
    what each field means. Written to disk as the released drafts are."""

    model_type = "domino"

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        raw, unused = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if is_domino(raw):
            draft, maker = read(raw, str(pretrained_model_name_or_path))
            raw = write_flat(draft, maker.backbone(raw), RELEASED_ARCHITECTURE)
        if raw.get("model_type") == RELEASED_MODEL_TYPE and "dflash_config" in raw:
            raw["model_type"] = cls.model_type
        return raw, unused

    def to_dict(self) -> dict[str, Any]:
        output: dict[str, Any] = super().to_dict()
        output["model_type"] = RELEASED_MODEL_TYPE
        output["architectures"] = [RELEASED_ARCHITECTURE]
        return output


class DominoAttention(nn.Module):
    """Queries from the block; keys and values from the context and the block."""

    is_causal = False

    def __init__(self, config: DominoConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = (
            config.num_attention_heads // config.num_key_value_heads
        )
        self.scaling = self.head_dim**-0.5
        bias, width = config.attention_bias, config.hidden_size
        queries = config.num_attention_heads * self.head_dim
        keys = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, queries, bias=bias)
        self.k_proj = nn.Linear(width, keys, bias=bias)
        self.v_proj = nn.Linear(width, keys, bias=bias)
        self.o_proj = nn.Linear(queries, width, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        block: torch.Tensor,  # (N, Q, H)
        context: torch.Tensor,  # (N, C, H)
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # over C + Q
        attention_mask: Any,
        past_key_values: Cache | None,
    ) -> torch.Tensor:
        num_context = context.shape[1]
        cos, sin = (table.unsqueeze(1) for table in position_embeddings)
        query = self._heads(self.q_norm, self.q_proj(block))
        query = _rotate(query, cos[:, :, num_context:], sin[:, :, num_context:])
        both = torch.cat([context, block], dim=1)
        key = _rotate(self._heads(self.k_norm, self.k_proj(both)), cos, sin)
        value = self._heads(nn.Identity(), self.v_proj(both))
        if past_key_values is not None:
            # Only the context is kept: the block is drafted anew each time.
            kept = past_key_values.update(
                key[:, :, :num_context], value[:, :, :num_context], self.layer_idx
            )
            key = torch.cat([kept[0], key[:, :, num_context:]], dim=2)
            value = torch.cat([kept[1], value[:, :, num_context:]], dim=2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        mixed, _ = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=0.0,
            scaling=self.scaling,
            is_causal=False,
        )
        return self.o_proj(mixed.flatten(2))

    def _heads(self, norm: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return norm(rows.unflatten(-1, (-1, self.head_dim))).transpose(1, 2)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return heads * cos + rotate_half(heads) * sin


class DominoDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: DominoConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = DominoAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(
            config.hidden_size, config.rms_norm_eps
        )

    def forward(
        self,
        block: torch.Tensor,
        context: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
    ) -> torch.Tensor:
        block = block + self.self_attn(
            self.input_layernorm(block),
            context,
            position_embeddings,
            attention_mask,
            past_key_values,
        )
        return block + self.mlp(self.post_attention_layernorm(block))


class DominoDraftModel(HeadSteps, PreTrainedModel):
    """The backbone and, unless it is a plain DFlash draft, the head.

    Attributes:
        has_head: Whether ``dflash_config.projector_type`` is "domino".
        shift_label, pure_draft_prefix_len, block_size, mask_token_id,
        target_layer_ids: As in the config; see ``DraftConfig``.
    """

    config_class = DominoConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _no_split_modules = ["DominoDecoderLayer"]  # noqa: RUF012 - as Transformers has it
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: DominoConfig) -> None:
        super().__init__(config)
        section = config.dflash_config
        if section.get("projector_type") is not None:
            source = config.name_or_path or "the draft"
            if read(config.to_dict(), source)[0].has_reduced_vocab:
                raise DraftConfigError(
                    f"{source}: draft_vocab_size is {config.draft_vocab_size}, less "
                    f"than vocab_size ({config.vocab_size}). Under Transformers a "
                    "draft must know the whole vocabulary: use this one in vLLM."
                )
        self.block_size: int = config.block_size
        self.target_layer_ids: list[int] = list(section["target_layer_ids"])
        self.mask_token_id: int = section["mask_token_id"]
        self.has_head = section.get("projector_type") == DOMINO_PROJECTOR
        self.shift_label: bool = section.get("shift_label", False)
        self.pure_draft_prefix_len = section.get("pure_draft_prefix_len", 0)
        width = config.hidden_size
        self.fc = nn.Linear(width * len(self.target_layer_ids), width, bias=False)
        self.hidden_norm = Qwen3RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(
            DominoDecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = Qwen3RMSNorm(width, config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config=config)
        if self.has_head:
            self.make_head(
                HeadShape(
                    hidden_size=width,
                    gru_hidden_dim=section["gru_hidden_dim"],
                    emb_dim=section["emb_dim"],
                    vocab_size=config.vocab_size,
                )
            )
        self.post_init()

    @classmethod
    def from_pretrained(cls, source: Any, *args: Any, **kwargs: Any) -> Any:
        """As Transformers', but a checkpoint that is not whole is refused: a draft with
        a tensor left as it was made drafts badly and says nothing.

        Raises:
            DominoError: The config or the tensors are not those of a whole draft.
        """
        with_info = kwargs.pop("output_loading_info", False)
        # Pickled weights can run code; the user may still say use_safetensors=False.
        kwargs.setdefault("use_safetensors", True)
        kwargs.setdefault("key_mapping", _our_names(source, kwargs.get("revision")))
        model, info = super().from_pretrained(
            source, *args, output_loading_info=True, **kwargs
        )
        for what, kind in (
            ("no tensor", "missing_keys"),
            ("a tensor too many,", "unexpected_keys"),
            ("another shape for", "mismatched_keys"),
        ):
            if names := sorted(map(str, info[kind])):
                raise CheckpointError(
                    f"{source}: {what} {names[0]!r} in the weights, going by "
                    "config.json. Fetch or export the draft again."
                )
        return (model, info) if with_info else model

    @property
    def max_drafts(self) -> int:
        """K the draft is trained for."""
        return self.block_size if self.shift_label else self.block_size - 1

    def context_features(self, hidden_states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """The target's ``output_hidden_states`` -> (N, tokens, layers * H)."""
        # Entry 0 is the embedding, so layer i's output is entry i + 1.
        return torch.cat([hidden_states[i + 1] for i in self.target_layer_ids], dim=-1)

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        target_hidden: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: Any = None,
        past_key_values: Cache | None = None,
        output_hidden_states: bool = False,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The backbone over query blocks.

        Args:
            inputs_embeds: (N, Q, H) the target's embeddings of [bonus, MASK, ...];
                several blocks may follow one another.
            target_hidden: (N, C, layers * H) ``context_features`` of the context; with
                a cache, of the context that is not yet in it.
            position_ids: (N, C + Q) positions of context, then of queries.
            attention_mask: What the attention implementation takes, over
                (N, 1, Q, cached + C + Q); None lets every query see everything.
            past_key_values: Keeps keys and values of the context, never of the block.
            output_hidden_states: Whether each layer's output is returned too.

        Returns:
            The rows (N, Q, H) after the final norm, and the layers' outputs.
        """
        context = self.hidden_norm(self.fc(target_hidden))
        position_embeddings = self.rotary_emb(inputs_embeds, position_ids)
        rows, outputs = inputs_embeds, []
        for layer in self.layers:
            rows = layer(
                rows, context, position_embeddings, attention_mask, past_key_values
            )
            if output_hidden_states:
                outputs.append(rows)
        return self.norm(rows), tuple(outputs)

    def spec_generate(
        self,
        target: PreTrainedModel,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        streamer: Any = None,
        num_speculative_tokens: int | None = None,
        **generate_kwargs: Any,
    ) -> "SpecGenerateOutput":
        """Generates with ``target``, this model drafting; batched and lossless.

        Args:
            target: Any causal LM with full attention that returns hidden states.
            input_ids: (B, L) prompts, padded on the left.
            attention_mask: (B, L) 0 where there is padding.
            generation_config: As for ``generate``; the target's own if not given.
            streamer: Gets tokens as they are accepted; for one row.
            num_speculative_tokens: Drafts a round; those trained for if not given.
            **generate_kwargs: Changes to the generation config: ``max_new_tokens``,
                ``do_sample``, ``temperature``, ``top_p``, ``repetition_penalty``, ...

        Returns:
            ``sequences``, ``acceptance_lengths`` and ``seconds``.

        Raises:
            GenerationError: What is asked for cannot be served; says what can.

        Example:
            >>> draft = DominoDraftModel.from_pretrained(path)
            >>> draft.spec_generate(target, **tokenizer(text), max_new_tokens=64)
        """
        from vllm_domino.generation import spec_generate

        output: SpecGenerateOutput = spec_generate(
            self,
            target,
            input_ids,
            attention_mask,
            generation_config,
            streamer,
            num_speculative_tokens,
            **generate_kwargs,
        )
        return output


def _our_names(source: Any, revision: str | None) -> dict[str, str]:
    """Patterns of a maker's tensor names -> ours."""
    raw, _ = Qwen3Config.get_config_dict(source, revision=revision or "main")
    maker = maker_of(raw)
    prefixes = maker.prefixes if maker is not None else ()
    return {f"^{re.escape(theirs)}": ours for theirs, ours in prefixes}


def xformers_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """``xformers.ops.memory_efficient_attention``, which runs on CUDA only."""
    if query.device.type != "cuda":
        raise RuntimeError(
            'attn_implementation="xformers" runs on CUDA only, and this model is on '
            f'{query.device.type}. Use "sdpa" here.'
        )
    try:
        from xformers.ops import memory_efficient_attention
    except ImportError as error:
        raise RuntimeError(
            'attn_implementation="xformers" needs the xformers package, which does '
            f'not import ({error}). Install it, or use "sdpa".'
        ) from None
    groups = getattr(module, "num_key_value_groups", 1)
    # (N, heads, tokens, width) -> (N, tokens, heads, width), each K/V head once a query
    # head.
    query = query.transpose(1, 2)
    key, value = (
        heads.repeat_interleave(groups, dim=1).transpose(1, 2) for heads in (key, value)
    )
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            lowest = torch.finfo(query.dtype).min
            zeros = query.new_zeros(attention_mask.shape)
            attention_mask = zeros.masked_fill(~attention_mask, lowest)
        attention_mask = attention_mask.expand(-1, query.shape[2], -1, -1)
    mixed = memory_efficient_attention(
        query, key, value, attn_bias=attention_mask, p=dropout, scale=scaling
    )
    return mixed, None


AttentionInterface.register("xformers", xformers_attention)
AutoConfig.register(DominoConfig.model_type, DominoConfig)
AutoModel.register(DominoConfig, DominoDraftModel)
