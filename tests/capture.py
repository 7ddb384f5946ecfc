# SPDX-License-Identifier: Apache-2.0
"""Refuses what a CUDA graph cannot hold: reads by the host, shapes made from data."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_OPERATORS = {
    _aten._local_scalar_dense.default,  # .item(), int(tensor), bool(tensor)
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
}
# On a CPU these read memory without an operator.
_METHODS = {torch.Tensor.tolist, torch.Tensor.numpy}


class CaptureError(AssertionError):
    pass


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        by_mask = func is _aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if func in _OPERATORS or by_mask:
            raise CaptureError(f"{func} cannot be captured in a CUDA graph")
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _METHODS:
            raise CaptureError(f"{func} cannot be captured in a CUDA graph")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_sync() -> Iterator[None]:
    with _Operators(), _Methods():
        yield
