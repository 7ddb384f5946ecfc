# SPDX-License-Identifier: Apache-2.0
"""Sampled output has the target's distribution, with Domino drafting."""

import pytest
import torch
from transformers import Qwen3ForCausalLM

from tests.engines import BYTES4, domino_job, run_engine
from tests.statistics import SMALLEST_P, p_value
from vllm_domino.cpu_sampling import expand_batch_to_tokens, is_right

TEMPERATURE = 0.8
DRAWS = 1500
PROMPT = 1  # of those whose second token is least certain


@torch.no_grad()
def second_token_probabilities(temperature: float) -> torch.Tensor:
    """(V,) of the second token after the prompt, over all first tokens."""
    target = Qwen3ForCausalLM.from_pretrained(BYTES4.target, dtype=torch.float32)
    prompt = torch.tensor(BYTES4.prompts[PROMPT])
    vocab = target.config.vocab_size

    def next_probabilities(tokens: torch.Tensor) -> torch.Tensor:
        logits = target(tokens).logits[:, -1].double()
        return (logits / temperature).softmax(-1)

    first = next_probabilities(prompt[None])[0]
    continued = torch.cat(
        [prompt.expand(vocab, -1), torch.arange(vocab)[:, None]], dim=1
    )
    return first @ next_probabilities(continued)


@pytest.mark.engine
def test_the_second_token_has_the_targets_distribution() -> None:
    # The first comes from the prompt's own step; the second is drafted and verified.
    job = domino_job(
        BYTES4.target,
        BYTES4.draft,
        [[BYTES4.prompts[PROMPT]] * DRAWS],
        2,
        temperature=TEMPERATURE,
        engine={"max_num_seqs": 64, "seed": 1},
    )
    job["record"] = False
    result = run_engine(job, "v1")
    tokens = torch.tensor([output[1] for output in result["batches"][0]])
    probabilities = second_token_probabilities(TEMPERATURE)
    observed = tokens.bincount(minlength=len(probabilities)).double()
    assert p_value(observed, probabilities) > SMALLEST_P
    assert result["counters"]["num_drafts"] > 0
    # And the test can tell: hotter by half is another distribution.
    assert p_value(observed, second_token_probabilities(1.2)) < SMALLEST_P


def test_expansion_is_right_where_vllms_is_probed_wrong() -> None:
    assert is_right(expand_batch_to_tokens)
    assert not is_right(lambda x, counts, total, old, new: x.new_empty(total).fill_(7))
    kept = expand_batch_to_tokens(torch.tensor([3, 9]), torch.tensor([1, 4]), 4, 9, 1)
    assert kept.tolist() == [3, 1, 1, 1]
    assert kept.dtype == torch.int64
