# SPDX-License-Identifier: Apache-2.0
"""Lets vLLM's V2 runner run on a machine without a GPU, through Triton's interpreter.

Put this folder on PYTHONPATH with TRITON_INTERPRET=1. vLLM turns Triton off where no
driver is active; the interpreter needs none, so one that only says "active" stands in.
"""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.backends import Backend, backends

    class _ActiveDriver:
        @staticmethod
        def is_active() -> bool:
            return True

    backends["cpu"] = Backend(
        compiler=next(iter(backends.values())).compiler, driver=_ActiveDriver
    )
