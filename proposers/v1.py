# SPDX-License-Identifier: Apache-2.0
"""Domino in vLLM's V1 model runner.

Differences from ``DFlashProposer``:
  * A draft with ``shift_label`` predicts from the bonus token's row on, so a block of K
    query rows, not 1 + K, drafts K tokens.
  * Drafts are picked one after the other by the head, not all at once.
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.dflash import DFlashProposer

from vllm_domino.config import DraftConfig


class DominoProposer(DFlashProposer):
    num_speculative_tokens: int

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, runner: Any = None
    ) -> None:
        super().__init__(vllm_config, device, runner)
        self.shift_label = DraftConfig.of(self.draft_model_config).shift_label

    def set_inputs_first_pass(
        self,
        target_token_ids: torch.Tensor,
        next_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        cad: CommonAttentionMetadata,
        num_rejected_tokens_gpu: torch.Tensor | None,
    ) -> tuple[int, torch.Tensor, CommonAttentionMetadata]:
        num_drafts = self.num_speculative_tokens
        if self.shift_label and num_drafts > 0:
            # The parent lays out 1 + num_speculative_tokens rows a request.
            self.num_speculative_tokens = num_drafts - 1
        try:
            num_query_tokens, to_sample, new_cad = super().set_inputs_first_pass(
                target_token_ids=target_token_ids,
                next_token_ids=next_token_ids,
                target_positions=target_positions,
                target_hidden_states=target_hidden_states,
                token_indices_to_sample=token_indices_to_sample,
                cad=cad,
                num_rejected_tokens_gpu=num_rejected_tokens_gpu,
            )
        finally:
            self.num_speculative_tokens = num_drafts
        if self.shift_label and num_drafts > 0:
            to_sample = self.arange[:num_query_tokens]
        return num_query_tokens, to_sample, new_cad

    def _sample_draft_tokens(
        self,
        # [num_reqs * num_speculative_tokens, hidden_size]
        hidden_states: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        num_drafts = self.num_speculative_tokens
        num_reqs = hidden_states.shape[0] // num_drafts
        num_rows = num_drafts if self.shift_label else 1 + num_drafts
        # The bonus token opens each request's query block.
        bonus = self.input_ids[: num_reqs * num_rows : num_rows]
        return self.model.draft(hidden_states, bonus).flatten(), None
