# SPDX-License-Identifier: Apache-2.0
"""Reproducer, vLLM 0.32 on a CPU: DFlash's context keys are wrong past the first layer.

``DFlashQwen3Model._normalize_context_k`` normalises the keys of all layers in one call,
with a [layers, head_dim] weight. The CPU kernel reads row 0 for every layer. Nothing
errors; acceptance falls.

    python docs/upstream/cpu_rms_norm_per_layer_weight.py
"""

import torch
from vllm import _custom_ops as ops

layers, tokens, heads, width, eps = 2, 3, 2, 64, 1e-6
keys = torch.randn(layers, tokens, heads, width)
weights = torch.stack([torch.full((width,), 1.0), torch.full((width,), 2.0)])
together = torch.empty_like(keys)
ops.rms_norm(together, keys, weights, eps)
apart = torch.empty_like(keys)
for layer in range(layers):
    ops.rms_norm(apart[layer], keys[layer], weights[layer], eps)
errors = [(together[i] - apart[i]).abs().max().item() for i in range(layers)]
print("largest difference by layer:", errors)
raise SystemExit(max(errors) > 1e-4)
