# SPDX-License-Identifier: Apache-2.0
"""Sampled output has the target's distribution, with Domino drafting."""

import pytest
import torch
from transformers import Qwen3ForCausalLM

from tests.engines import BYTES4, domino_job, run_engine
from tests.statistics import SMALLEST_P, p_value
from vllm_domino.cpu_sampling import (
    expand_batch_to_tokens,
    is_right,
    skipping_no_tokens,
    takes_no_tokens,
)

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


def test_top_k_bears_a_step_without_drafts() -> None:
    def like_vllms(
        logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
    ) -> torch.Tensor:
        assert k is not None
        return logits.topk(int(k.max())).values

    assert not takes_no_tokens(like_vllms)
    mended = skipping_no_tokens(like_vllms)
    assert takes_no_tokens(mended)
    logits, k = torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([2])
    assert mended(logits, k, None).tolist() == [[3.0, 2.0]]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.support(param="feature")
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize(
    ("feature", "method"),
    [
        (f"a seeded request repeats itself, {method} drafts", method)
        for method in ("greedy", "probabilistic")
    ],
)
def test_a_seeded_request_repeats_itself(
    feature: str, method: str, runner: str
) -> None:
    """Alone, again, and among others whose prompts are read in chunks meanwhile."""
    # vLLM's V1 runner stops on a CPU when a seeded request's prompt comes in chunks,
    # drafting or not: a CPU generator has no offset to wind back.
    chunk = {"v1": 512, "v2": 128}[runner]
    seeded = {"temperature": 0.9, "seed": 42, "max_tokens": 24, "ignore_eos": True}
    others = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True}
    first, rest = BYTES4.prompts[11], BYTES4.prompts[:4]
    job = {
        "target": str(BYTES4.target),
        "speculative_config": {
            "method": "domino",
            "model": str(BYTES4.draft),
            "draft_sample_method": method,
        },
        "cases": {
            "alone": {"prompts": [first], "sampling": [seeded]},
            "again": {"prompts": [first], "sampling": [seeded]},
            "among others": {
                "prompts": [*rest, first],
                "sampling": [others] * len(rest) + [seeded],
            },
            "another seed": {"prompts": [first], "sampling": [seeded | {"seed": 43}]},
        },
        "engine": {"max_num_batched_tokens": chunk, "max_num_seqs": 5},
    }
    cases = run_engine(job, runner)["cases"]
    tokens = {
        name: rows[-1]["completions"][0]["tokens"] for name, rows in cases.items()
    }
    assert tokens["again"] == tokens["alone"]
    assert tokens["among others"] == tokens["alone"]
    assert tokens["another seed"] != tokens["alone"]
