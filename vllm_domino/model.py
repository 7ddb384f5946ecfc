# SPDX-License-Identifier: Apache-2.0
"""The draft model inside vLLM: DFlash's backbone, and the Domino head on top.

Its layers live in vLLM's paged KV cache, in the same blocks as the target's; the token
embedding and the lm_head are the target's own.

Differences from ``DFlashQwen3ForCausalLM``:
  * ``draft`` picks a block's tokens one after the other through the head.
  * Context keys are normalised layer by layer.
  * Weights are refused unless they are a whole Domino draft.
  * With tensor parallelism the head's vocabulary matrix is sharded like the lm_head,
    and a greedy draft exchanges one (value, id) pair a rank, not logits.
"""

import logging
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.models.qwen3_dflash import (
    DFlashQwen3ForCausalLM,
    DFlashQwen3Model,
)

from vllm_domino.checkpoint import (
    HEAD_PREFIXES,
    check_tensors,
    check_values,
    target_token_ids,
)
from vllm_domino.config import Drafting, HeadMode, num_query_rows
from vllm_domino.head import DominoHead, Embed, HeadShape, Pick, rollout
from vllm_domino.head_mode import make_rollout
from vllm_domino.makers import BY_NAME
from vllm_domino.rollouts import Rollout
from vllm_domino.steps import Steps

logger = logging.getLogger("vllm.domino")

_VOCAB_MATRIX = "embed_proj.2.weight"


class DominoBackbone(DFlashQwen3Model):
    """DFlash's backbone with the context keys of every layer right on a CPU too."""

    def _normalize_context_k(self, all_k: torch.Tensor) -> torch.Tensor:
        """Applies each layer's own k_norm: (L, tokens, kv_heads, head_dim) -> same.

        vLLM hands the kernel the weights of all layers at once; its CPU kernel then
        uses layer 0's for all (vLLM 0.32).
        """
        normed = torch.empty_like(all_k)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(normed[layer], all_k[layer], weight, self._rms_norm_eps)
        return normed


class DominoForCausalLM(DFlashQwen3ForCausalLM):
    """A Domino draft: ``model`` is the backbone, ``head`` the correction."""

    model_cls = DominoBackbone

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.source: str = self.draft_model_config.model
        drafting = Drafting.of(self.draft_model_config)
        self.draft_config = drafting.draft
        self.runtime = drafting.runtime
        self._maker = BY_NAME[drafting.maker]
        # This rank's part of the vocabulary, padding included. The lm_head is replaced
        # by the target's, which is cut at the same places.
        self._shard = self.lm_head.shard_indices
        self._num_shards: int = self.lm_head.tp_size
        self.head = DominoHead(
            HeadShape(
                hidden_size=self.draft_config.hidden_size,
                gru_hidden_dim=self.draft_config.gru_hidden_dim,
                emb_dim=self.draft_config.emb_dim,
                vocab_size=self._shard.num_elements_padded,
            ),
            self.draft_config.pure_draft_prefix_len,
        )
        # The target's id of each token of a reduced vocabulary.
        self._target_ids: torch.Tensor | None = None
        self._rollout: Rollout | None = None
        self._captured = False

    def prepare(self, runner: str, speculative_config: Any) -> None:
        """Lays out what drafting needs beside the weights, once they and the shared
        embedding are there.

        Args:
            runner: "V1" or "V2"; the latter captures the draft step.
        """
        self._without_lora()
        self._captured = runner == "V2"
        mode = self._lay_out()
        self._announce(runner, speculative_config, mode)

    def _lay_out(self) -> HeadMode:
        """What is made of the weights; made again when they are loaded again."""
        table, gates = self._table(), None
        if self.runtime.project_embeddings:
            gates = self.head.project_embeddings(self.model.embed_tokens.weight)
        steps = Steps(self.head, self._lookup(table), gates)
        alone = self._num_shards == 1 and self._target_ids is None
        mode, self._rollout = make_rollout(
            self.runtime, steps, self._captured, alone, table
        )
        return mode

    def _lookup(self, table: torch.Tensor | None) -> Embed:
        """The target's embedding, by the shortest way there is."""
        shared: Embed = self.model.embed_tokens
        return shared if table is None else lambda tokens: F.embedding(tokens, table)

    def _table(self) -> torch.Tensor | None:
        """The target's embedding, (V, H), where this rank has all of it as it is."""
        shared = self.model.embed_tokens
        method = getattr(shared, "quant_method", None)
        if self._num_shards > 1 or not isinstance(method, UnquantizedEmbeddingMethod):
            return None
        table: torch.Tensor = shared.weight
        return table.detach()

    def _announce(self, runner: str, speculative_config: Any, mode: HeadMode) -> None:
        """One line in the log that says what drafts, and how."""
        if get_tensor_model_parallel_rank() > 0:
            return
        logger.info(
            "Domino: draft %s (%s), %d query rows a block (trained with %d), "
            "num_speculative_tokens %d, %s model runner, head %s over %d tokens, "
            "drafts %s",
            self.source,
            self._maker.title,
            num_query_rows(speculative_config),
            self.draft_config.block_size,
            speculative_config.num_speculative_tokens,
            runner,
            mode,
            self.draft_config.drafted_vocab,
            speculative_config.draft_sample_method,
        )

    def _without_lora(self) -> None:
        """Takes the target's embedding out of its LoRA wrapper, if it has one.

        The wrapper looks up which adapter each row of the *target's* batch has; a
        draft's rows are others.
        """
        shared = self.model.embed_tokens
        self.model.embed_tokens = getattr(shared, "base_layer", shared)

    def draft(
        self,
        # [num_reqs * num_drafts, hidden_size], request-major
        hidden_states: torch.Tensor,
        # [num_reqs]
        bonus: torch.Tensor,
        pick: Pick | None = None,
    ) -> torch.Tensor:
        """Drafts a block a request: [num_reqs, num_drafts] token ids of the target.

        Args:
            pick: Chooses tokens from corrected logits over the target's whole
                vocabulary, (B, V); the likeliest if not given, and then no rank sees
                another's logits.
        """
        num_reqs = bonus.shape[0]
        base_logits = self.logits_processor(
            self.lm_head, hidden_states, skip_gather=True
        )
        # Rows of padding score 0, which could win.
        base_logits[:, self._shard.num_org_elements :] = -torch.inf
        base_logits = base_logits.view(num_reqs, -1, base_logits.shape[-1])
        hidden_states = hidden_states.view(num_reqs, -1, hidden_states.shape[-1])
        if pick is not None:
            return rollout(
                self.head,
                hidden_states,
                base_logits,
                bonus,
                self.model.embed_tokens,
                lambda position, shard: pick(position, self._whole(shard)),
            )
        assert self._rollout is not None
        return self._rollout.draft(hidden_states, base_logits, bonus, self._target_id)

    def _target_id(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The target's id of the likeliest token over all ranks, from this rank's
        likeliest: (B,), (B,) -> (B,)."""
        if self._num_shards > 1:
            ids = ids + self._shard.org_vocab_start_index
            # As float32 an id is exact up to 16 million. Of equal values the first
            # rank's wins, which is the lowest id.
            pair = torch.stack([values.float(), ids.float()], dim=-1)
            pairs = tensor_model_parallel_all_gather(pair, dim=-1)
            pairs = pairs.view(-1, self._num_shards, 2)
            best = pairs[..., 0].argmax(dim=-1, keepdim=True)
            ids = pairs[..., 1].gather(-1, best).squeeze(-1).long()
        return ids if self._target_ids is None else self._target_ids[ids]

    def _whole(self, shard: torch.Tensor) -> torch.Tensor:
        """Logits over the target's vocabulary: (B, V_rank) -> (B, V)."""
        logits = shard
        if self._num_shards > 1:
            # An uncorrected position is a view into the block.
            logits = tensor_model_parallel_all_gather(logits.contiguous(), dim=-1)
        logits = logits[..., : self.draft_config.drafted_vocab]
        if self._target_ids is None:
            return logits
        shape = (logits.shape[0], self.draft_config.vocab_size)
        return logits.new_full(shape, -torch.inf).index_copy_(
            1, self._target_ids, logits
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        tensors = {}
        for name, tensor in weights:
            check_values(self.draft_config, self._maker, name, tensor, self.source)
            tensors[self._maker.ours(name)] = tensor
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        check_tensors(self.draft_config, self._maker, shapes, self.source)
        head = {
            name: tensors.pop(name)
            for name in list(tensors)
            if name.startswith(HEAD_PREFIXES)
        }
        head[_VOCAB_MATRIX] = self._shard_of(head[_VOCAB_MATRIX])
        if "d2t" in tensors:
            ids = target_token_ids(self.draft_config, tensors["d2t"], self.source)
            self._target_ids = ids.to(self.head.embed_proj[2].weight.device)
        if "mask_embedding" in tensors:
            self.model.has_separate_mask_embedding = True
        super().load_weights(tensors.items())
        self.head.load_state_dict(head)
        if self._rollout is not None:
            self._lay_out()

    def _shard_of(self, matrix: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a (V, ...) matrix, zeros below where it is padded."""
        start = self._shard.org_vocab_start_index
        rows = matrix[start : self._shard.org_vocab_end_index]
        shard = rows.new_zeros(self._shard.num_elements_padded, *rows.shape[1:])
        shard[: len(rows)] = rows
        return shard
