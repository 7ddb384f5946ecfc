# SPDX-License-Identifier: Apache-2.0
"""Whole training runs in processes of their own: killed and resumed, on two processes,
on a full disk; and what comes out is a draft that loads."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.engines import BYTES4, ROOT
from vllm_domino.checkpoint import check_folder
from vllm_domino.makers import read
from vllm_domino.training.plot import read_metrics

STEPS = 12
TIMEOUT_S = 300


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    rows = zip(BYTES4.prompts, BYTES4.golden["outputs"], strict=True)
    with path.open("w") as file:
        for i, (prompt, answer) in enumerate(rows):
            row = {"index": i, "prompt_ids": prompt, "answer_ids": answer}
            file.write(json.dumps(row) + "\n")
    return path


def write_recipe(folder: Path, data: Path, name: str, **changes: Any) -> Path:
    recipe = {
        "target": str(BYTES4.target),
        "data": str(data),
        "output": str(folder / name),
        "draft": {
            "num_hidden_layers": 1,
            "block_size": 4,
            "target_layer_ids": [0, 2],
            "mask_token_id": 287,
            "emb_dim": 16,
            "gru_hidden_dim": 24,
        },
        "sequence_length": 256,
        "anchors": 8,
        "steps": STEPS,
        "dtype": "float32",
        "save_every": 3,
        "log_every": 1,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe | changes))
    return path


def command(recipe: Path, launcher: tuple[str, ...] = (sys.executable,)) -> list[str]:
    return [*launcher, "-m", "vllm_domino", "train", "run", str(recipe)]


def environment() -> dict[str, str]:
    # One thread: sums of floats must come out the same, however busy the machine.
    single = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    return {**os.environ, "PYTHONPATH": str(ROOT), **single}


def run(arguments: list[str], **extra: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        **extra,
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(folder / "draft" / "model.safetensors")
    return loaded


def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path, data: Path) -> None:
    whole = write_recipe(tmp_path, data, "whole")
    done = run(command(whole))
    assert done.returncode == 0, done.stdout + done.stderr
    killed = write_recipe(tmp_path, data, "killed")
    process = subprocess.Popen(
        command(killed), env=environment(), stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + TIMEOUT_S
    while not (tmp_path / "killed/checkpoints/step-6/progress.json").is_file():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed/draft").exists()
    again = run(command(killed))
    assert again.returncode == 1
    assert "holds a run already. Give --resume" in again.stdout.replace("\n", " ")
    resumed = run([*command(killed), "--resume"])
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resumed at step" in resumed.stdout
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    # The log goes on without a gap or a step twice.
    for name in ("whole", "killed"):
        metrics = read_metrics(tmp_path / name / "metrics.jsonl")
        assert metrics["step"] == list(range(1, STEPS + 1))
        assert (tmp_path / name / "run.png").stat().st_size > 1000
        assert list((tmp_path / name / "tensorboard").rglob("events.*"))
    raw = json.loads((tmp_path / "whole/draft/config.json").read_text())
    check_folder(*read(raw, "draft"), tmp_path / "whole/draft")


def test_two_processes_are_one_with_twice_the_accumulation(
    tmp_path: Path, data: Path
) -> None:
    one = write_recipe(tmp_path, data, "one", accumulation=2)
    two = write_recipe(tmp_path, data, "two")
    torchrun = (sys.executable, "-m", "torch.distributed.run")
    launcher = (*torchrun, "--standalone", "--nproc-per-node", "2")
    for processes, arguments in ((1, command(one)), (2, command(two, launcher))):
        done = run(arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"steps of 2 packs; processes: {processes}" in done.stdout
    expected, found = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() < 1e-6, name


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, data: Path) -> None:
    recipe = write_recipe(tmp_path, data, "full")

    def limit() -> None:
        # A file that would grow past 100 kB fails to: the checkpoint's weights do.
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = run(command(recipe), preexec_fn=limit)
    assert done.returncode != 0
    checkpoints = tmp_path / "full" / "checkpoints"
    assert checkpoints.is_dir()
    assert list(checkpoints.iterdir()) == []
    assert not (tmp_path / "full" / "draft").exists()
    # With room again, the same command goes through.
    again = run([*command(recipe), "--resume"])
    assert again.returncode == 0, again.stdout + again.stderr


def test_plain_dflash_trains_and_is_written_as_plain_dflash(
    tmp_path: Path, data: Path
) -> None:
    recipe = write_recipe(
        tmp_path,
        data,
        "dflash",
        draft={"projector": "none", "num_hidden_layers": 1, "mask_token_id": 287},
        steps=2,
        dtype="bfloat16",
    )
    done = run(command(recipe))
    assert done.returncode == 0, done.stdout + done.stderr
    raw = json.loads((tmp_path / "dflash/draft/config.json").read_text())
    assert raw["architectures"] == ["DFlashDraftModel"]
    assert raw["model_type"] == "qwen3"
    assert set(raw["dflash_config"]) == {"mask_token_id", "target_layer_ids"}
    tensors = weights(tmp_path / "dflash")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    names = tensors.keys()
    assert not any(name.startswith(("prefix_gru", "embed_proj")) for name in names)
