# SPDX-License-Identifier: Apache-2.0
"""Domino in vLLM's V2 model runner.

Differences from ``DFlashSpeculator``:
  * The block has as many query rows as the draft's layout asks for: K with
    ``shift_label``, where the bonus token's row predicts too, 1 + K without it, or
    those it was trained with.
  * Drafts are picked one after the other by the head, not all at once.

A FULL CUDA graph captures ``_generate_draft``: the backbone's forward and the head's
loop. Shapes and buffers are fixed, and nothing is read back to the host.
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from vllm_domino.config import Drafting, num_query_rows


class DominoSpeculator(DFlashSpeculator):
    _speculator_name = "Domino"
    sample_indices: torch.Tensor
    sample_pos: torch.Tensor
    sample_idx_mapping: torch.Tensor

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.num_drafts = self.num_speculative_steps
        draft_config = Drafting.of(self.draft_model_config).draft
        self.sample_from_anchor = draft_config.shift_label
        self.num_query_per_req = num_query_rows(self.speculative_config)
        self._reserve_columns(self.num_query_per_req - (not self.sample_from_anchor))
        # Where each request's bonus token lies in the query block. A buffer made once:
        # a captured graph reads it by address.
        self._bonus_indices = (
            torch.arange(self.max_num_reqs, dtype=torch.int64, device=device)
            * self.num_query_per_req
        )

    def _reserve_columns(self, num_columns: int) -> None:
        """The kernel that lays out a block marks every row that can predict; those of a
        trained block may be more than are drafted."""
        self.num_speculative_steps = num_columns
        size = self.max_num_reqs * num_columns
        self.sample_indices = self.sample_indices.new_zeros(size)
        self.sample_pos = self.sample_pos.new_zeros(size)
        self.sample_idx_mapping = self.sample_idx_mapping.new_full((size,), -1)

    def load_draft_model(
        self, target_model: torch.nn.Module, target_attn_layer_names: set[str]
    ) -> torch.nn.Module:
        model = super().load_draft_model(target_model, target_attn_layer_names)
        model.prepare("V2", self.speculative_config)
        return model

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        # What a request may verify at once, however many columns its block has.
        verified = self.speculative_config.num_speculative_tokens + 1
        num_tokens: int = min(num_reqs * verified, self.max_num_tokens)
        return num_tokens

    def _drafted(self, column_buffer: torch.Tensor, num_reqs: int) -> torch.Tensor:
        """A per-column buffer's entries of the columns that are drafted: (B, K)."""
        columns = self.num_speculative_steps
        return column_buffer[: num_reqs * columns].view(-1, columns)[
            :, : self.num_drafts
        ]

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        hidden_states = self._run_model(
            num_tokens_padded,
            attn_metadata,
            slot_mappings,
            num_tokens_across_dp,
            cudagraph_runtime_mode,
        )
        request = self._drafted(self.sample_idx_mapping, num_reqs)
        predicted = self._drafted(self.sample_pos, num_reqs)
        if self.draft_watermarker is None:
            sample = gumbel_sample
        else:
            sample = self.draft_watermarker.sample

        def pick(position: int, logits: torch.Tensor) -> torch.Tensor:
            step = self.sample_col[position]
            self._maybe_predict_acceptance(logits, request[:, position], step)
            if self.draft_logits is None:
                return logits.argmax(dim=-1)
            return sample(
                logits,
                request[:, position],
                self.temperature,
                self.seeds,
                # A draw is keyed by the position before the token it gives.
                predicted[:, position] - 1,
                apply_temperature=True,
                is_drafting=True,
                logits_cache=self.draft_logits,
                logits_cache_col=step,
                use_fp64=self.use_fp64_gumbel,
            )

        needs_logits = (
            self.draft_logits is not None or self.acceptance_estimator is not None
        )
        rows = self._drafted(self.sample_indices, num_reqs).flatten()
        self.draft_tokens[:num_reqs] = self.model.draft(
            hidden_states[rows],
            self.input_buffers.input_ids[self._bonus_indices[:num_reqs]],
            pick if needs_logits else None,
        )
