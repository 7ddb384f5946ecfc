# SPDX-License-Identifier: Apache-2.0
"""``vllm-domino convert``: every bit kept, nothing overwritten, whole or not at all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.commands import WEIGHTS, command
from tests.drafts import copy_draft, read_config
from tests.engines import BYTES4, DEMO, domino_job, run_engine
from tests.makers import common
from vllm_domino.cli import app
from vllm_domino.draft import Draft


def values(folder: Path) -> dict[str, torch.Tensor]:
    return dict(Draft.open(str(folder)).tensors())


@pytest.mark.parametrize("to", ["released", "specforge", "speculators"])
@pytest.mark.parametrize(
    "source", ["specforge-logit-head", "automodel", "modelopt", "speculators"]
)
def test_convert_keeps_every_bit(source: str, to: str, tmp_path: Path) -> None:
    draft = common.DATA / source
    target = ("--target", BYTES4.target)
    assert command("convert", draft, tmp_path / "a", "--to", to, *target)[0] == 0
    back = "released" if to != "released" else "specforge"
    status, output = command(
        "convert", tmp_path / "a", tmp_path / "b", "--to", back, *target
    )
    assert status == 0, output
    before = values(draft)
    config = Draft.open(str(draft)).config
    for folder in (tmp_path / "a", tmp_path / "b"):
        after = values(folder)
        assert after.keys() == before.keys()
        for name, tensor in before.items():
            assert after[name].dtype == tensor.dtype
            assert torch.equal(after[name], tensor)
        converted = Draft.open(str(folder)).config
        assert converted.drafted_vocab == config.drafted_vocab
        whole = {"draft_vocab_size": config.draft_vocab_size}
        assert converted.model_copy(update=whole) == config


def test_there_and_back_is_the_same_file(tmp_path: Path) -> None:
    source = copy_draft(DEMO / "domino", tmp_path / "source")
    for step, (before, after, to) in enumerate(
        (("source", "there", "speculators"), ("there", "back", "released"))
    ):
        status, output = command(
            "convert", tmp_path / before, tmp_path / after, "--to", to, "--target", "t"
        )
        assert status == 0, (step, output)
    assert load_equal(source / WEIGHTS, tmp_path / "back" / WEIGHTS)
    first, last = read_config(source), read_config(tmp_path / "back")
    # What every draft of that layout then says, and the source left out.
    added = {"draft_vocab_size", "attention_bias"} - first.keys()
    assert {k: v for k, v in last.items() if k not in added} == first


def load_equal(one: Path, other: Path) -> bool:
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_convert_overwrites_nothing_unasked(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "precious").touch()
    arguments = ("convert", common.DATA / "modelopt", there, "--to", "released")
    status, output = command(*arguments)
    assert status == 1
    assert "is there already" in output
    assert (there / "precious").exists()
    assert command(*arguments, "--force")[0] == 0
    assert not (there / "precious").exists()
    assert sorted(p.name for p in there.iterdir()) == ["config.json", WEIGHTS]
    assert [p.name for p in tmp_path.iterdir()] == ["there"]
    # Others may read it, as they may what anyone makes here.
    (tmp_path / "new").touch()
    assert (there / WEIGHTS).stat().st_mode == (tmp_path / "new").stat().st_mode


def test_convert_does_not_eat_its_source(tmp_path: Path) -> None:
    draft = copy_draft(common.DATA / "modelopt", tmp_path / "draft")
    status, output = command("convert", draft, draft, "--to", "specforge", "--force")
    assert status == 1
    assert "is the draft itself" in output
    Draft.open(str(draft)).check()


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["norm.weight"].fill_(float("nan"))

    draft = copy_draft(common.DATA / "modelopt", tmp_path / "d", edit_tensors=spoil)
    status, output = command("convert", draft, tmp_path / "new", "--to", "released")
    assert status == 1
    assert "not finite" in output
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_convert_on_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vllm_domino.convert.save_file", full)
    result = CliRunner().invoke(
        app,
        [
            "convert",
            str(common.DATA / "modelopt"),
            str(tmp_path / "a"),
            "--to=released",
        ],
    )
    assert result.exit_code == 1
    assert "No space left" in result.output
    assert list(tmp_path.iterdir()) == []


def test_convert_to_speculators_needs_a_target(tmp_path: Path) -> None:
    status, output = command(
        "convert", common.DATA / "modelopt", tmp_path / "a", "--to", "speculators"
    )
    assert status == 1
    assert "Pass --target" in output


def test_convert_to_an_unknown_layout(tmp_path: Path) -> None:
    status, output = command(
        "convert", common.DATA / "modelopt", tmp_path / "a", "--to", "gguf"
    )
    assert status == 1
    assert "released, specforge, speculators" in " ".join(output.split()) or (
        "layouts that are written" in output
    )


@pytest.mark.engine
def test_a_converted_draft_drafts_the_same(tmp_path: Path) -> None:
    target = str(BYTES4.target)
    source: Path = BYTES4.draft
    for to in ("released", "speculators"):
        command("convert", source, tmp_path / to, "--to", to, "--target", target)
        source = tmp_path / to
    result = run_engine(domino_job(BYTES4.target, source, [BYTES4.prompts], 100), "v1")
    assert result["batches"][0] == BYTES4.golden["outputs"]
    assert result["counters"]["num_drafts"] == BYTES4.golden["drafts"]
    assert result["counters"]["num_accepted_tokens"] == BYTES4.golden["accepted"]
