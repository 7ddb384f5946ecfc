# SPDX-License-Identifier: Apache-2.0
"""``vllm-domino bench head``: what it measures is real, and it says what it did."""

import json
from pathlib import Path

import torch

from tests.commands import command
from tests.engines import BYTES4
from vllm_domino.bench.head_case import SIZES, make_case

LIKE = BYTES4.draft


def test_it_measures_and_writes_what_it_measured(tmp_path: Path) -> None:
    json_file, png = tmp_path / "head.json", tmp_path / "head.png"
    arguments: list[str | Path] = ["bench", "head", "--shape", "bytes4"]
    arguments += ["--like", LIKE]
    arguments += ["--batch", "1", "--batch", "3", "--repeats", "2", "--blocks", "8"]
    status, output = command(*arguments, "--json", json_file, "--png", png)
    assert status == 0, output
    results = json.loads(json_file.read_text())
    assert [result["num_reqs"] for result in results] == [1, 3]
    for result in results:
        assert 0.3 <= result["changed"] <= 0.5
        assert result["over_lm_head"]["lm_head alone"] == 1
        agreed = {t["mode"]: t["agrees"] for t in result["timings"]}
        assert agreed["exact"] == 1
        # A pool of more than the vocabulary is the vocabulary.
        assert agreed["pool of 2048"] == 1
        assert all(len(t["seconds"]) == 2 for t in result["timings"])
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "over lm_head" in output


def test_a_small_head_in_float32_is_drafted_natively_too(tmp_path: Path) -> None:
    json_file = tmp_path / "head.json"
    arguments: list[str | Path] = ["bench", "head", "--shape", "bytes4"]
    arguments += ["--like", LIKE, "--dtype", "float32"]
    arguments += ["--repeats", "2", "--blocks", "8"]
    status, output = command(*arguments, "--json", json_file)
    assert status == 0, output
    (result,) = json.loads(json_file.read_text())
    agreed = {t["mode"]: t["agrees"] for t in result["timings"]}
    assert agreed["fused"] == agreed["exact"] == 1


def test_the_made_matrix_is_like_the_trained_one() -> None:
    case = make_case(SIZES["bytes4"], LIKE, 0.4, torch.float32, seed=1)
    made = torch.linalg.svdvals(case.head.embed_proj[2].weight)
    energy = (made**2).cumsum(0) / (made**2).sum()
    # 94% in half of its directions, as the pair's own W2.
    assert 0.85 < float(energy[15]) < 0.99
    assert abs(case.changed - 0.4) < 0.1


def test_an_unknown_shape() -> None:
    status, output = command("bench", "head", "--shape", "huge", "--like", LIKE)
    assert status == 1
    assert "qwen3-8b" in output


def test_sglang_that_is_not_there(tmp_path: Path) -> None:
    arguments: list[str | Path] = ["bench", "head", "--shape", "bytes4"]
    arguments += ["--like", LIKE]
    status, output = command(*arguments, "--sglang", tmp_path)
    assert status == 1
    assert "Unpack SGLang's wheel" in output
