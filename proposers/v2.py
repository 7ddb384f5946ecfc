# SPDX-License-Identifier: Apache-2.0
"""Domino in vLLM's V2 model runner.

Differences from ``DFlashSpeculator``:
  * A draft with ``shift_label`` predicts from the bonus token's row on, so a block of K
    query rows, not 1 + K, drafts K tokens.
  * Drafts are picked one after the other by the head, not all at once.

A FULL CUDA graph captures ``_generate_draft``: the backbone's forward and the head's
loop. Shapes and buffers are fixed, and nothing is read back to the host.
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

from vllm_domino.config import DraftConfig


class DominoSpeculator(DFlashSpeculator):
    _speculator_name = "Domino"

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        draft_config = DraftConfig.of(self.draft_model_config)
        self.sample_from_anchor = draft_config.shift_label
        self.num_query_per_req = self.num_speculative_steps + (
            0 if self.sample_from_anchor else 1
        )
        # Where each request's bonus token lies in the query block. A buffer made once:
        # a captured graph reads it by address.
        self._bonus_indices = (
            torch.arange(self.max_num_reqs, dtype=torch.int64, device=device)
            * self.num_query_per_req
        )

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
        num_drafts = self.num_speculative_steps
        num_sampled = num_reqs * num_drafts
        request = self.sample_idx_mapping[:num_sampled].view(num_reqs, num_drafts)

        def pick(position: int, logits: torch.Tensor) -> torch.Tensor:
            self._maybe_predict_acceptance(
                logits, request[:, position], self.sample_col[position]
            )
            return logits.argmax(dim=-1)

        self.draft_tokens[:num_reqs] = self.model.draft(
            hidden_states[self.sample_indices[:num_sampled]],
            self.input_buffers.input_ids[self._bonus_indices[:num_reqs]],
            pick,
        )
