# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM's V2 runner run on a machine without a GPU, through Triton's interpreter.

Put this folder on PYTHONPATH with TRITON_INTERPRET=1. vLLM turns Triton off where no
driver is active; the interpreter needs none, so one that only says "active" stands in.

The interpreter also keeps a mask that was made of integers (``bits == 0``) in an
integer array and then refuses it, where the compiler has an i1; it is cast here. Else
vLLM's structured output and ngram kernels do not run. Its top-k/top-p kernel does not
run either (a loop's variable is a plain int there): vLLM's torch fallback stands in.
libdevice is a table of names that a GPU's compiler fills in; NumPy fills in the two
that vLLM's sampler calls, or a rejected probabilistic draft could not be resampled.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import wrapt
    from triton.backends import Backend, backends
    from triton.runtime import interpreter

    class _ActiveDriver:
        @staticmethod
        def is_active() -> bool:
            return True

    backends["cpu"] = Backend(
        compiler=next(iter(backends.values())).compiler, driver=_ActiveDriver
    )

    def _with_boolean_mask(name: str, position: int) -> None:
        access = getattr(interpreter.InterpreterBuilder, name)

        def cast(self, *args):  # type: ignore[no-untyped-def]
            mask = args[position]
            mask.data = mask.data.astype(bool, copy=False)
            return access(self, *args)

        setattr(interpreter.InterpreterBuilder, name, cast)

    _with_boolean_mask("create_masked_load", 1)
    _with_boolean_mask("create_masked_store", 2)

    @wrapt.when_imported("vllm.v1.sample.ops.topk_topp_sampler")
    def _without_its_kernel(module):  # type: ignore[no-untyped-def]
        module.HAS_TRITON = False

    @wrapt.when_imported("triton.language.extra.libdevice")
    def _from_numpy(module):  # type: ignore[no-untyped-def]
        import numpy as np
        import triton.language as tl

        def log1p(x):  # type: ignore[no-untyped-def]
            with np.errstate(divide="ignore", invalid="ignore"):
                data = np.log1p(x.handle.data)
            return tl.tensor(interpreter.TensorHandle(data, x.dtype), x.type)

        def isnan(x):  # type: ignore[no-untyped-def]
            data = np.isnan(x.handle.data).astype(np.int32)
            handle = interpreter.TensorHandle(data, tl.int32)
            return tl.tensor(handle, x.type.with_element_ty(tl.int32))

        module.log1p, module.isnan = log1p, isnan
