# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels against their twins, in Triton's interpreter.

It must be asked for before Triton is imported, so the checks run in a process of their
own; ``bench/gpu_check.py`` runs the same ones on a GPU.
"""

import json
import subprocess
import sys

import pytest

from tests.engines import ROOT, environment
from vllm_domino.bench import kernel_checks

NAMES = [check.__name__ for check in kernel_checks.CHECKS]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, str]]:
    """What each check said, by its name and case; "" where it held."""
    done = subprocess.run(
        [sys.executable, "bench/gpu_check.py", "--interpret", "--json", "-"],
        env=environment("v2"),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout, done.stderr
    found: dict[str, dict[str, str]] = json.loads(done.stdout)["checks"]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_is_its_twin(name: str, outcomes: dict[str, dict[str, str]]) -> None:
    cases = len(kernel_checks.CASES) * len(kernel_checks.DTYPES)
    assert len(outcomes[name]) == cases
    failed = {case: said for case, said in outcomes[name].items() if said}
    assert not failed


def test_whole_blocks_are_denses(outcomes: dict[str, dict[str, str]]) -> None:
    blocks = outcomes["check_blocks"]
    assert list(blocks) == ["B 1", "B 17"]
    assert not {case: said for case, said in blocks.items() if said}


def test_the_check_on_a_gpu_needs_torch_and_triton_only() -> None:
    others = [
        "pydantic",
        "rich",
        "safetensors",
        "transformers",
        "typer",
        "vllm",
        "wrapt",
    ]
    code = (
        f"import runpy, sys; sys.modules |= dict.fromkeys({others}); "
        "runpy.run_path('bench/gpu_check.py')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
