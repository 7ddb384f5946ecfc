# SPDX-License-Identifier: Apache-2.0
"""Reproducer, vLLM 0.32 and 0.33 on a CPU: with speculative decoding, top-k alone stops
the engine.

The rejection sampler also runs in a step in which no request had drafts, such as one
that only reads prompts. ``apply_top_k_only`` then takes the maximum of an empty ``k``:
"max(): Expected reduction dim to be specified for input.numel() == 0".

    python docs/upstream/cpu_top_k_without_drafts.py
"""

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_only

no_tokens = torch.empty(0, 32)
try:
    apply_top_k_only(no_tokens, torch.empty(0, dtype=torch.int32))
except RuntimeError as error:
    raise SystemExit(f"found: {error}") from error
print("expected and found: nothing to do")
