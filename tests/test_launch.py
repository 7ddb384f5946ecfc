# SPDX-License-Identifier: Apache-2.0
"""``vllm-domino serve`` and ``generate``: vLLM's own, with the config filled in."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import command
from tests.engines import BYTES4, DEMO, ROOT
from tests.makers import common
from vllm_domino import launch


def test_serve_is_vllms_own_command(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(launch, "serve", ran.append)
    status, _ = command(
        "serve",
        BYTES4.target,
        "--draft",
        BYTES4.draft,
        "-k",
        "4",
        "--draft-sample-method",
        "probabilistic",
        "--max-model-len",
        "512",
        "--enforce-eager",
    )
    assert status == 0
    script, *rest = ran[0]
    assert script == str(Path(sys.executable).parent / "vllm")
    settings = {
        "method": "domino",
        "model": str(BYTES4.draft),
        "num_speculative_tokens": 4,
        "draft_sample_method": "probabilistic",
    }
    assert rest[:3] == ["serve", str(BYTES4.target), "--speculative-config"]
    assert json.loads(rest[3]) == settings
    assert rest[4:] == ["--max-model-len", "512", "--enforce-eager"]


def test_serve_without_a_target_asks_the_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(launch, "serve", ran.append)
    draft = common.DATA / "speculators"
    assert command("serve", "--draft", draft, "--port", "1234")[0] == 0
    assert ran[0][1:3] == ["serve", "pairs/bytes4/target"]
    assert ran[0][5:] == ["--port", "1234"]


def test_serve_without_any_target() -> None:
    status, output = command("serve", "--draft", BYTES4.draft)
    assert status == 1
    assert "Name the target" in output


def test_serve_with_a_speculative_config_of_ones_own() -> None:
    status, output = command(
        "serve", BYTES4.target, "--draft", BYTES4.draft, "--speculative-config={}"
    )
    assert status == 1
    assert "--speculative-config is what this command fills in" in output


def test_serve_with_something_that_is_no_draft() -> None:
    status, output = command("serve", BYTES4.target, "--draft", BYTES4.target)
    assert status == 1
    assert "not a Domino draft" in output


@pytest.mark.engine
def test_generate_answers_through_vllm(tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text(json.dumps(["def read(self):"]))
    arguments = ["generate", DEMO / "target", "--draft", DEMO / "domino"]
    arguments += ["--prompt", "import os", "--prompts", tmp_path / "prompts.json"]
    arguments += ["--max-tokens", "12", "--json"]
    arguments += ["--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]
    script = shutil.which("vllm-domino", path=str(Path(sys.executable).parent))
    assert script is not None
    process = subprocess.run(
        [script, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        timeout=600,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    found = json.loads(process.stdout[process.stdout.index("{") :])
    prompts = [answer["prompt"] for answer in found["answers"]]
    assert prompts == ["import os", "def read(self):"]
    assert all(answer["text"] for answer in found["answers"])
    assert found["acceptance_length"] > 1


def test_generate_without_a_prompt() -> None:
    status, output = command("generate", DEMO / "target", "--draft", DEMO / "domino")
    assert status == 1
    assert "Pass --prompt or --prompts" in output


@pytest.mark.parametrize("text", ["{", '{"a": 1}', "[1]"])
def test_generate_with_prompts_that_are_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    status, output = command(
        "generate", "t", "--draft", DEMO / "domino", "--prompts", tmp_path / "p.json"
    )
    assert status == 1
    assert "p.json" in output


@pytest.mark.parametrize(
    "name", ["serve", "generate", "demo", "inspect", "convert", "doctor", "mend"]
)
def test_every_command_helps_with_an_example(name: str) -> None:
    status, output = command(name, "--help")
    assert status == 0
    assert "Example:" in output
