# SPDX-License-Identifier: Apache-2.0
"""What people combine with speculative decoding, as requests: greedy, so that Domino's
output must be plain decoding's, whatever else is asked of a request.

Each case is a list of prompts and a list of sampling settings, one a prompt.
"""

from typing import Any

from tests.engines import BYTES4, BYTES8, Pair

# The larger pair where it is there; both have the same prompts and vocabulary.
PAIR: Pair = BYTES8 if BYTES8.folder.is_dir() else BYTES4
BLOCK_SIZE = 32
# A prompt may fill it.
MAX_MODEL_LEN = 6 * BLOCK_SIZE
EOS = 257
NEWLINE = 10

_PROMPTS = PAIR.prompts[:4]
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "n": {"type": "integer"},
    },
    "required": ["name", "n"],
}


def _case(
    prompts: list[list[int]] | None = None, tokens: int | None = 24, **sampling: Any
) -> dict[str, Any]:
    chosen = _PROMPTS if prompts is None else prompts
    settings = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    return {"prompts": chosen, "sampling": [settings | sampling] * len(chosen)}


def _mixed() -> dict[str, Any]:
    """Greedy requests among sampled ones; only the greedy ones are compared."""
    case = _case(PAIR.prompts[:8])
    hot = case["sampling"][0] | {"temperature": 1.0, "top_p": 0.9, "seed": 5}
    case["sampling"] = [
        hot if i % 2 else greedy for i, greedy in enumerate(case["sampling"])
    ]
    return case


def _long(length: int) -> list[int]:
    """A prompt of that many tokens."""
    return (PAIR.prompts[10] * 3)[:length]


CASES: dict[str, dict[str, Any]] = {
    "greedy": _case(),
    # The same again: every full block of the prompts is now in the cache.
    "prefix caching, hit": _case(),
    # vLLM wants a temperature for n > 1. Its lowest leaves the likeliest tokens, except
    # for the first prompt's, where two are as likely.
    "n = 4": _case(_PROMPTS[1:], n=4, temperature=0.01),
    "logprobs": _case(logprobs=3),
    "prompt_logprobs": _case(prompt_logprobs=2),
    "stop strings": _case(stop=["self", "("], tokens=40),
    "stop token ids": _case(stop_token_ids=[NEWLINE], tokens=40),
    "min_tokens": _case(stop_token_ids=[NEWLINE], min_tokens=12, tokens=40),
    "repetition penalty": _case(repetition_penalty=1.3),
    "presence penalty": _case(presence_penalty=1.5),
    "frequency penalty": _case(frequency_penalty=0.8),
    "bad_words": _case(bad_words=["self", "s"]),
    "structured output, JSON schema": _case(
        structured_outputs={"json": _SCHEMA}, ignore_eos=False, tokens=48
    ),
    "structured output, regex": _case(
        structured_outputs={"regex": r"(red|green|blue)-[0-9]{3}"}, ignore_eos=False
    ),
    "structured output, grammar": _case(
        structured_outputs={"grammar": 'root ::= "x = " [0-9]+ ("+" [0-9]+)*'},
    ),
    "mixed greedy and sampled requests": _mixed(),
    "max_tokens 1": _case(tokens=1),
    "prompts of one token": _case([[65], [10], [256], [120]]),
    "prompts near max_model_len": _case(
        [_long(MAX_MODEL_LEN - left) for left in (1, 2, 8, 9)], tokens=None
    ),
    "generation up to max_model_len": _case(
        [_long(length) for length in (150, 160, 161, 175)], tokens=None
    ),
    "hundreds of requests over few slots": _case(PAIR.prompts * 13, tokens=6),
}
# Of a mixed batch only these are greedy.
GREEDY_ROWS = {"mixed greedy and sampled requests": slice(0, None, 2)}
