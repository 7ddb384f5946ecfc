# SPDX-License-Identifier: Apache-2.0
"""The entry point that vLLM calls in every process it starts, often several times."""

import logging

logger = logging.getLogger("vllm.domino")

_registered = False


def register() -> None:
    """Puts Domino where vLLM will look for it. Idempotent, cheap, and never raises.

    Only hooks are set here, to run when vLLM imports the modules they name, so that a
    process that never drafts pays for nothing.
    """
    global _registered
    if _registered:
        return
    _registered = True
    try:
        from vllm_domino import seams

        seams.install()
    except Exception:
        logger.exception("vllm-domino could not be set up; Domino is not available.")
