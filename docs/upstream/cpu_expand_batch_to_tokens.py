# SPDX-License-Identifier: Apache-2.0
"""Reproducer, vLLM 0.32 on a CPU: sampled speculative decoding is not lossless.

``_expand_kernel_impl`` in ``vllm/utils/cpu_triton_utils.py`` hands the C++ kernel
``_ensure_int64(output)``, a copy unless the output is int64 already, and drops it; the
float input is truncated to integers besides. ``expand_batch_to_tokens`` then returns
uninitialised memory, so with temperature > 0 the rejection sampler divides logits by
whatever was there.

    python docs/upstream/cpu_expand_batch_to_tokens.py
"""

import torch
from vllm.platforms import current_platform

# As a worker does when it starts.
current_platform.import_kernels()
current_platform.register_triton_kernel_overrides()

from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens  # noqa: E402

temperature = torch.tensor([0.25, 0.0, 1.5])
cu_num_tokens = torch.tensor([2, 3, 5], dtype=torch.int32)
expected = [0.25, 0.25, 1.0, 1.5, 1.5]
found = expand_batch_to_tokens(temperature, cu_num_tokens, 5, 0, 1).tolist()
print("expected", expected)
print("found   ", found)
raise SystemExit(found != expected)
