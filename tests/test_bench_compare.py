# SPDX-License-Identifier: Apache-2.0
"""``bench offline`` and ``bench serve``: what they compare, and what they say."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import command
from tests.engines import DEMO
from vllm_domino.bench import report as form
from vllm_domino.bench.methods import Choice
from vllm_domino.bench.result import Report, Row, Run, percentiles
from vllm_domino.errors import DraftConfigError

DRAFT = str(DEMO / "domino")
DFLASH = str(DEMO / "dflash")
TRAINED = 8


# --- Methods ---


def test_methods_draft_as_many_as_the_domino_draft() -> None:
    methods = Choice(["none", "ngram", "dflash", "domino"], DRAFT, DFLASH).methods()
    assert [m.name for m in methods] == [
        "none",
        "ngram, K 8",
        "dflash, K 8",
        "domino, K 8",
    ]
    assert methods[0].config is None
    for method in methods[1:]:
        assert method.config is not None
        assert method.config["num_speculative_tokens"] == TRAINED
    assert methods[3].config == {
        "method": "domino",
        "model": DRAFT,
        "num_speculative_tokens": TRAINED,
    }


def test_each_number_of_drafts_and_any_config() -> None:
    given = 'eagle={"method": "eagle3", "model": "x"}'
    methods = Choice(["none", given, "domino"], DRAFT, num_drafts=(2, 4)).methods()
    assert [m.name for m in methods] == ["none", "eagle", "domino, K 2", "domino, K 4"]
    assert methods[1].config == {"method": "eagle3", "model": "x"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["domino"], "--method domino needs --draft"),
        (["dflash"], "--method dflash needs --dflash"),
        (["medusa"], "--method is 'medusa'; known are none, ngram"),
        (["x={"], "--method x: it is not JSON"),
        (["x=[]"], "--method x: expected a JSON object"),
        (["none", "none"], "--method none is there twice"),
        (["suffix"], "needs the package arctic-inference"),
    ],
)
def test_methods_that_cannot_be(names: list[str], message: str) -> None:
    with pytest.raises(DraftConfigError, match=message):
        Choice(names).methods()


# --- Figures ---


def run(rate: float, **more: Any) -> Run:
    return Run(rate, {"p50": 0.1, "p99": 0.2}, {"p50": 0.01, "p99": 0.02}, **more)


def report() -> Report:
    drafted = [
        run(200, drafts=10, drafted=40, accepted=20, accepted_at=[9, 6, 4, 1]),
        run(300, drafts=10, drafted=40, accepted=10, accepted_at=[5, 3, 2, 0]),
        run(250, drafts=20, drafted=80, accepted=30, accepted_at=[15, 9, 4, 2]),
    ]
    for one in drafted:
        one.split = {"verify": 0.004, "draft": 0.002, "head": 0.001}
    rows = [
        Row("none", 1, [run(100), run(90), run(130)]),
        Row("domino, K 4", 1, drafted),
        Row("none", 4, [run(400)]),
        Row("domino, K 4", 4, [run(200)]),
    ]
    same = {"domino, K 4": 3}
    return Report("vllm-domino bench", "target", "p", "machine", rows, 5, same)


def test_figures() -> None:
    row = report().rows[1]
    assert row.tokens_per_s == 250
    assert report().speed_up(row) == 2.5
    assert row.acceptance_length == 1 + 60 / 40
    assert row.accepted_at == [29 / 40, 18 / 40, 10 / 40, 3 / 40]
    assert row.latency("ttft", "p99") == 0.2
    assert row.latency("itl", "p50") is None
    assert report().rows[0].acceptance_length is None
    assert report().speed_up(report().rows[3]) == 0.5


def test_without_plain_decoding_there_is_no_speed_up() -> None:
    found = report()
    found.rows = found.rows[1:2]
    assert found.speed_up(found.rows[0]) is None
    assert json.loads(form.as_json(found))["rows"][0]["speed_up"] is None


def test_percentiles() -> None:
    assert percentiles([float(i) for i in range(101)]) == {"p50": 50, "p99": 99}
    assert percentiles([3.0]) == {"p50": 3, "p99": 3}
    assert percentiles([]) == {}


def test_the_page_has_all_of_it(tmp_path: Path) -> None:
    names = form.plot(report(), tmp_path, "x")
    assert names == ["x-speed-up.png", "x-acceptance.png"]
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    page = form.markdown(report(), names)
    assert "| domino, K 4 | 1 | 250 (200 - 300) | 2.50x | 2.50 | 100.0, 200.0 |" in page
    assert "4.00 | 2.00 | 1.00 |" in page
    assert "domino, K 4: 3 of 5 outputs equal plain decoding's." in page
    assert "![x acceptance](x-acceptance.png)" in page


# --- Engines ---

SMALL: list[Any] = [
    "--num-prompts",
    4,
    "--max-tokens",
    24,
    "--repeats",
    2,
    "--seed",
    3,
]
ENGINE: list[Any] = [
    "--dtype",
    "float32",
    "--max-model-len",
    512,
    "--enforce-eager",
]


def compare(kind: str, folder: Path, *more: Any) -> tuple[dict[str, Any], str]:
    arguments: list[Any] = ["bench", kind, DEMO / "target", "--draft", DRAFT, *SMALL]
    arguments += ["--prompts", DEMO / "prompts.json", *more, *ENGINE]
    files: list[Any] = ["--json", folder / "b.json", "--markdown", folder / "b.md"]
    status, output = command(*arguments, *files)
    assert status == 0, output
    found: dict[str, Any] = json.loads((folder / "b.json").read_text())
    for row in found["rows"]:
        assert len(row["runs"]) == 2
        assert all(run["tokens_per_s"] > 0 for run in row["runs"])
        drafts = sum(run["drafts"] for run in row["runs"])
        accepted = sum(run["accepted"] for run in row["runs"])
        assert (drafts > 0) == (row["method"] != "none")
        if drafts:
            assert row["acceptance_length"] == pytest.approx(1 + accepted / drafts)
            assert sum(row["accepted_at"]) == pytest.approx(accepted / drafts, abs=0.01)
            # Every answer is as long as it may be, or ends where the target ends it.
            assert 1 < row["acceptance_length"] <= 1 + TRAINED
    return found, (folder / "b.md").read_text()


@pytest.mark.engine
def test_offline(tmp_path: Path) -> None:
    found, page = compare("offline", tmp_path, "--dflash", DFLASH, "--at-once", 4)
    methods = ["none", "ngram, K 8", "dflash, K 8", "domino, K 8"]
    assert [row["method"] for row in found["rows"]] == methods
    assert found["same_outputs"] == dict.fromkeys(methods[1:], 4)
    taus = {row["method"]: row["acceptance_length"] for row in found["rows"]}
    assert taus["domino, K 8"] > taus["dflash, K 8"] > 2
    split = found["rows"][3]["runs"][0]["split"]
    assert all(split[part] > 0 for part in ("verify", "draft", "head"))
    assert "b-acceptance.png" in page
    assert (tmp_path / "b-speed-up.png").is_file()


@pytest.mark.engine
def test_serve(tmp_path: Path) -> None:
    methods = ["--method", "none", "--method", "domino", "--num-drafts", 4]
    found, page = compare("serve", tmp_path, *methods, "--at-once", 2)
    assert [row["method"] for row in found["rows"]] == ["none", "domino, K 4"]
    assert found["same_outputs"] == {"domino, K 4": 4}
    assert all(run["itl"]["p99"] > 0 for row in found["rows"] for run in row["runs"])
    assert "ITL p50, p99" in page


def test_an_engine_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    bad = 'bad={"method": "ngram", "num_speculative_tokens": -1}'
    arguments: list[Any] = [
        "bench",
        "offline",
        DEMO / "target",
        "--method",
        bad,
        *SMALL,
    ]
    status, output = command(*arguments, "--prompts", DEMO / "prompts.json", *ENGINE)
    assert status == 1
    assert "the engine for bad ended" in " ".join(output.split())
    assert "num_speculative_tokens" in output


def test_our_own_flags_are_not_passed_on() -> None:
    arguments: list[Any] = [
        "bench",
        "offline",
        DEMO / "target",
        "--method",
        "none",
        *SMALL,
    ]
    arguments += ["--prompts", DEMO / "prompts.json", "--speculative-config", "{}"]
    status, output = command(*arguments)
    assert status == 1
    assert "--speculative-config is what this command fills in" in output


@pytest.mark.parametrize("kind", ["offline", "serve"])
def test_what_is_wrong_is_told_before_any_engine_starts(
    kind: str, tmp_path: Path
) -> None:
    given: list[Any] = ["bench", kind, DEMO / "target", "--method", "none"]
    given += ["--prompts", DEMO / "prompts.json"]
    for option in ("--json", "--markdown"):
        status, output = command(*given, option, tmp_path / "no" / "x.json")
        assert status == 1
        assert "there is no folder" in output
    status, output = command("bench", kind, tmp_path / "nothing", *given[3:])
    assert status == 1
    assert "there is no such folder" in output
