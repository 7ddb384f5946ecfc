# SPDX-License-Identifier: Apache-2.0
"""Tables and plots of a comparison."""

import json
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from vllm_domino.bench.result import PLAIN, Report, Row

_HEADER = ("method", "at once", "tokens/s", "speed-up", "tokens a step")
_LATENCIES = ("ttft", "tpot", "itl")
_PARTS = ("verify", "draft", "head")
_PERCENTILES = ("p50", "p99")


@dataclass(frozen=True)
class _Form:
    """How cells are written: short for a terminal, whole for a page."""

    percentiles: tuple[str, ...]
    with_range: bool


_SHORT, _WHOLE = _Form(_PERCENTILES[:1], False), _Form(_PERCENTILES, True)


def _cells(report: Report, form: _Form) -> list[dict[str, str]]:
    """Each row's cells by their column's title; times in milliseconds."""
    return [_row(report, row, form) for row in report.rows]


def _row(report: Report, row: Row, form: _Form) -> dict[str, str]:
    rates = [run.tokens_per_s for run in row.runs]
    speed_up, length = report.speed_up(row), row.acceptance_length
    rate = f"{row.tokens_per_s:.0f}"
    if form.with_range:
        rate += f" ({min(rates):.0f} - {max(rates):.0f})"
    shown = (
        row.method,
        str(row.at_once),
        rate,
        "" if speed_up is None else f"{speed_up:.2f}x",
        "" if length is None else f"{length:.2f}",
    )
    found = dict(zip(_HEADER, shown, strict=True))
    for name in _LATENCIES:
        values = [row.latency(name, percentile) for percentile in form.percentiles]
        if None not in values:
            title = f"{name.upper()} {', '.join(form.percentiles)}"
            found[title] = ", ".join(f"{value * 1e3:.1f}" for value in values if value)
    return found | {name: f"{value * 1e3:.2f}" for name, value in row.split().items()}


def _titles(cells: list[dict[str, str]]) -> list[str]:
    """All rows' columns, the parts of a step last."""
    found = dict.fromkeys(title for row in cells for title in row)
    return sorted(found, key=lambda title: title in _PARTS)


def table(report: Report) -> Table:
    """For a terminal."""
    cells = _cells(report, _SHORT)
    found = Table(
        title=f"{report.target}: {report.prompts}",
        caption="times in ms; verify, draft and head of a step",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    titles = _titles(cells)
    for title in titles:
        found.add_column(title, justify="left" if title == "method" else "right")
    for row, before in zip(cells, [cells[0], *cells], strict=False):
        if row["at once"] != before["at once"]:
            found.add_section()
        found.add_row(*(row.get(title, "") for title in titles))
    return found


def markdown(report: Report, plot_names: list[str]) -> str:
    """For a page: the command, the machine, the table and the plots."""
    cells = _cells(report, _WHOLE)
    titles = _titles(cells)
    lines = [
        f"    {report.command}",
        "",
        f"{report.target}; {report.prompts}; {report.machine}. Medians of "
        f"{len(report.rows[0].runs)} rounds in turn, and ranges; times in ms, verify, "
        "draft and head of a step.",
        "",
        f"| {' | '.join(titles)} |",
        f"| --- |{' ---: |' * (len(titles) - 1)}",
    ]
    for row in cells:
        lines.append(f"| {' | '.join(row.get(title, '') for title in titles)} |")
    for sentence in outputs(report):
        lines += ["", sentence]
    for name in plot_names:
        lines += ["", f"![{name.removesuffix('.png').replace('-', ' ')}]({name})"]
    return "\n".join(lines) + "\n"


def outputs(report: Report) -> list[str]:
    """How many greedy outputs were plain decoding's, a sentence a method."""
    return [
        f"{method}: {same} of {report.num_prompts} outputs equal plain decoding's."
        for method, same in report.same_outputs.items()
    ]


def as_json(report: Report) -> str:
    return json.dumps(report.as_dict(), indent=2) + "\n"


def plot(report: Report, folder: Path, stem: str) -> list[str]:
    """Speed-up against requests at once, and acceptance by position; file names."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = []
    methods = list(dict.fromkeys(row.method for row in report.rows))
    drafted = [m for m in methods if m != PLAIN]
    if any(report.speed_up(row) is not None for row in report.rows) and drafted:
        figure, axes = plt.subplots(figsize=(6, 4))
        for method in drafted:
            rows = [row for row in report.rows if row.method == method]
            points = [(row.at_once, report.speed_up(row)) for row in rows]
            axes.plot(*zip(*points, strict=True), marker="o", label=method)
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("requests at once")
        axes.set_ylabel("tokens/s over plain decoding")
        names.append(_save(figure, axes, folder, f"{stem}-speed-up.png"))
    positions = {row.method: row.accepted_at for row in report.rows if row.accepted_at}
    if positions:
        figure, axes = plt.subplots(figsize=(6, 4))
        for method, parts in positions.items():
            axes.plot(range(1, len(parts) + 1), parts, marker="o", label=method)
        axes.set_ylim(0, 1)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("position in the block")
        axes.set_ylabel("part of the blocks accepted there")
        names.append(_save(figure, axes, folder, f"{stem}-acceptance.png"))
    return names


def _save(figure, axes, folder: Path, name: str) -> str:  # type: ignore[no-untyped-def]
    import matplotlib.pyplot as plt

    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / name, dpi=120)
    plt.close(figure)
    return name
