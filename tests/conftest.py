# SPDX-License-Identifier: Apache-2.0
"""Options of the test run, and variables that vLLM must see before it is imported."""

import os
from pathlib import Path

import pytest

from tests.support import SupportReport, tell_places

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # Two engines on the same cores wait for each other at every step; each worker, and
    # all that it starts, keeps to one core.
    cores = sorted(os.sched_getaffinity(0))
    core = cores[int(worker.removeprefix("gw")) % len(cores)]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(core)
    os.environ["OMP_NUM_THREADS"] = "1"

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
# No test needs a hub, and none should wait for one.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--vllm-source",
        type=Path,
        action="append",
        default=[],
        help="Another vLLM package folder to check the seams against (repeatable).",
    )
    parser.addoption(
        "--support-report",
        type=Path,
        help="Where to write the table of features and runners.",
    )


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("--support-report")) is not None:
        config.pluginmanager.register(SupportReport(path))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tell_places(items)
