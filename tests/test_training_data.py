# SPDX-License-Identifier: Apache-2.0
"""``vllm-domino train data``: the target's own answers, and going on after a kill."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines import BYTES4, ROOT

pytestmark = pytest.mark.engine

MAX_TOKENS = 20
CHOSEN = (0, 3, 9)
TIMEOUT_S = 300


def answer(prompts: Path, output: Path) -> str:
    engine = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True}
    command = [sys.executable, "-m", "vllm_domino", "train", "data"]
    command += [str(BYTES4.target), str(prompts), str(output)]
    command += ["--max-tokens", str(MAX_TOKENS), "--engine", json.dumps(engine)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_answers_are_the_targets_and_a_killed_run_goes_on(tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    texts = [bytes(BYTES4.prompts[i]).decode() for i in CHOSEN]
    prompts.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
    # As a kill leaves it: one answer is there, and half of another.
    expected = [
        {
            "index": number,
            "prompt_ids": BYTES4.prompts[i],
            "answer_ids": BYTES4.golden["outputs"][i][:MAX_TOKENS],
        }
        for number, i in enumerate(CHOSEN)
    ]
    lines = [json.dumps(row) + "\n" for row in expected]
    output.write_text(lines[1] + lines[2][:40])
    assert "1 answers are there, 2 to go" in answer(prompts, output)
    assert sorted(output.read_text().splitlines(keepends=True)) == sorted(lines)
    # Nothing is left to do, and no engine is started for it.
    assert "3 answers are there, 0 to go" in answer(prompts, output)
