# SPDX-License-Identifier: Apache-2.0
"""Runs ``vllm-domino`` commands in this process, as a user types them."""

from pathlib import Path

from typer.testing import CliRunner

from vllm_domino.cli import app

WEIGHTS = "model.safetensors"


def command(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output
