# SPDX-License-Identifier: Apache-2.0
"""Products with a weight that is laid out once."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

# (..., in) -> (..., out).
Linear = Callable[[torch.Tensor], torch.Tensor]

# Smaller weights stay in a core's cache, and gain less than the call costs.
_WORTHWHILE_BYTES = 2**21


def linear(weight: torch.Tensor) -> Linear:
    """x -> x W^T, for a W (out, in) that will not change.

    On a CPU a large bfloat16 W is copied, once, into the order in which its matrix
    units read; the product then takes about two thirds of the time and gives the same
    bits. Elsewhere, W itself is used.
    """
    if _can_be_laid_out(weight):
        operations = torch.ops.mkldnn
        packed = operations._reorder_linear_weight(weight.detach().contiguous())

        def product(x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = operations._linear_pointwise(
                x, packed, None, "none", [], ""
            )
            return out

        return product
    if weight.device.type == "cpu":
        # A slice of a matrix takes a slow path in bfloat16.
        weight = weight.contiguous()
    return lambda x: F.linear(x, weight)


def _can_be_laid_out(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    if weight.nbytes < _WORTHWHILE_BYTES or not torch.backends.mkldnn.is_available():
        return False
    supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return supported
