# SPDX-License-Identifier: Apache-2.0
"""Runs engine jobs in processes of their own, and keeps what each one said.

Engines take about 25 s to start, so a job that several tests ask for runs once.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
RUNNERS = ("v1", "v2")
TIMEOUT_S = 2400
# The runner is chosen, and CPU memory for the KV cache kept small, by environment.
_ENVIRONMENT = {
    "v1": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    # With two ranks vLLM compiles a function of the embedding, eager mode or not, and
    # the compiler asks the stand-in driver what it cannot answer.
    "v2": {
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",
    },
}


@dataclass(frozen=True)
class Pair:
    """A target, its Domino draft, prompts, and what an oracle made of them."""

    folder: Path

    @property
    def target(self) -> Path:
        return self.folder / "target"

    @property
    def draft(self) -> Path:
        return self.folder / "domino-shift"

    @functools.cached_property
    def prompts(self) -> list[list[int]]:
        loaded: list[list[int]] = json.loads((self.folder / "prompts.json").read_text())
        return loaded

    @functools.cached_property
    def golden(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.folder / "golden.json").read_text())
        return loaded


BYTES4 = Pair(ROOT / "pairs" / "bytes4")
DEMO = ROOT / "pairs" / "demo"
# 25 MB, so not in the repository; where it lies beside it, it is tested too.
BYTES8 = Pair(ROOT.parent / "shared" / "pairs" / "bytes8")
PAIRS = [pair for pair in (BYTES4, BYTES8) if pair.folder.is_dir()]


def environment(runner: str) -> dict[str, str]:
    """Variables for a vLLM process with this runner on a CPU."""
    path = [str(ROOT)]
    if runner == "v2":
        path.insert(0, str(ROOT / "tests" / "interpreter"))
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": os.pathsep.join(path),
        **_ENVIRONMENT[runner],
    }


def start_engine(
    job: dict[str, Any],
    runner: str,
    python: str = sys.executable,
    env: dict[str, str] | None = None,
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Runs a job to its end, whatever that is."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-domino-"))
    (folder / "job.json").write_text(json.dumps(job))
    process = subprocess.run(
        [
            python,
            "-m",
            "tests.engine_process",
            folder / "job.json",
            folder / "out.json",
        ],
        env=environment(runner) | (env or {}),
        cwd=ROOT,
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
    )
    return process, folder / "out.json"


@functools.cache
def _run(job: str, runner: str, python: str) -> dict[str, Any]:
    loaded = json.loads(job)
    process, path = start_engine(loaded, runner, python, loaded.get("env"))
    output = process.stdout + process.stderr
    assert process.returncode == 0, f"{runner} engine failed:\n{output[-6000:]}"
    result: dict[str, Any] = json.loads(path.read_text())
    if (hidden := path.with_suffix(".safetensors")).is_file():
        result["hidden"] = load_file(hidden)
    return result


def run_engine(
    job: dict[str, Any], runner: str, python: str = sys.executable
) -> dict[str, Any]:
    """A job's result; the same job runs once a session, its cases in their order."""
    return _run(json.dumps(job), runner, python)


def domino_job(
    target: Path,
    draft: Path,
    batches: list[list[list[int]]],
    max_tokens: int,
    **extra: Any,
) -> dict[str, Any]:
    settings = {"method": "domino", "model": str(draft)} | extra.pop("settings", {})
    return {
        "target": str(target),
        "speculative_config": settings,
        "batches": batches,
        "max_tokens": max_tokens,
        "record": True,
        **extra,
    }
