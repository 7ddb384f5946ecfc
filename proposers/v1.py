# SPDX-License-Identifier: Apache-2.0
"""Domino in vLLM's V1 model runner.

Differences from ``DFlashProposer``:
  * The block has as many query rows as the draft's layout asks for: K with
    ``shift_label``, where the bonus token's row predicts too, 1 + K without it, or
    those it was trained with.
  * Drafts are picked one after the other by the head, not all at once.
  * A seeded request's probabilistic drafts come from its own generator.
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import random_sample
from vllm.v1.spec_decode.dflash import DFlashProposer

from vllm_domino.config import Drafting, num_query_rows

# Below it a temperature means greedy, as in vLLM's sampler.
_GREEDY_TEMPERATURE = 1e-5


class DominoProposer(DFlashProposer):
    num_speculative_tokens: int
    max_query_tokens: int
    max_padded_query_tokens: int

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, runner: Any = None
    ) -> None:
        super().__init__(vllm_config, device, runner)
        self._runner = runner
        self.shift_label = Drafting.of(self.draft_model_config).draft.shift_label
        self.num_query_rows = num_query_rows(self.speculative_config)
        self._reserve_rows(self.max_batch_size * self.num_query_rows)

    def _reserve_rows(self, num_rows: int) -> None:
        """The parent's buffers hold 1 + K rows a request; a trained block may have
        more."""
        if num_rows <= self.max_query_tokens:
            return
        self.max_query_tokens = num_rows
        self.max_padded_query_tokens = max(self.max_padded_query_tokens, num_rows)
        self.max_positions = self.max_num_tokens + self.max_padded_query_tokens
        rows = torch.zeros(
            self.max_padded_query_tokens, dtype=torch.int64, device=self.device
        )
        self._slot_mapping_buffer, self.positions = rows, rows.clone()
        self.arange = torch.arange(
            self.max_positions + 1, device=self.device, dtype=torch.int32
        )

    def load_model(self, target_model: torch.nn.Module) -> None:
        super().load_model(target_model)
        self.model.prepare("V1", self.speculative_config)

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
        # The parent lays out 1 + num_speculative_tokens rows a request.
        self.num_speculative_tokens = self.num_query_rows - 1
        try:
            num_query_tokens, _, new_cad = super().set_inputs_first_pass(
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
        rows = self.arange[:num_query_tokens].view(-1, self.num_query_rows)
        first = 0 if self.shift_label else 1
        to_sample = rows[:, first : first + num_drafts].flatten()
        return num_query_tokens, to_sample, new_cad

    def _sample_draft_tokens(
        self,
        # [num_reqs * num_speculative_tokens, hidden_size]
        hidden_states: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        num_reqs = hidden_states.shape[0] // self.num_speculative_tokens
        # The bonus token opens each request's query block.
        rows = self.num_query_rows
        bonus = self.input_ids[: num_reqs * rows : rows]
        if not self._enable_probabilistic_draft_probs or sampling_metadata.all_greedy:
            return self.model.draft(hidden_states, bonus).flatten(), None
        probs: list[torch.Tensor] = []
        generators = self._generators(sampling_metadata)
        temperature = sampling_metadata.temperature
        assert temperature is not None
        greedy = (temperature < _GREEDY_TEMPERATURE)[:, None]
        divisor = torch.where(greedy, 1.0, temperature[:, None])

        def pick(position: int, logits: torch.Tensor) -> torch.Tensor:
            probs.append((logits.float() / divisor).softmax(dim=-1))
            # Sampling divides in place, and the sampler needs what was drawn from.
            drawn = random_sample(probs[-1].clone(), generators, self.use_fp64_gumbel)
            return torch.where(greedy.squeeze(1), logits.argmax(dim=-1), drawn)

        drafts = self.model.draft(hidden_states, bonus, pick)
        return drafts.flatten(), torch.stack(probs, dim=1).flatten(0, 1)

    def _generators(self, metadata: SamplingMetadata) -> dict[int, torch.Generator]:
        """Generators of the seeded requests whose drafts will be verified.

        A request in the middle of its prompt drafts too, as often as its prompt was
        chunked; were that to move its generator, its output would depend on load.
        """
        discarded = self._runner.discard_request_mask.np
        return {i: g for i, g in metadata.generators.items() if not discarded[i]}
