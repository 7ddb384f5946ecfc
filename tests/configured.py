# SPDX-License-Identifier: Apache-2.0
"""Takes a speculative config through vLLM as far as an engine's start."""

from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs


def configure(target: Path, settings: dict[str, Any], **engine: Any) -> Any:
    """What ``vllm serve`` and ``LLM`` do with a speculative config, engine not started;
    vLLM's ``SpeculativeConfig``."""
    arguments = EngineArgs(
        model=str(target),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        speculative_config=settings,
        **engine,
    )
    return arguments.create_engine_config().speculative_config


def domino(draft: Path | str, **settings: Any) -> dict[str, Any]:
    return {"method": "domino", "model": str(draft), **settings}
