# SPDX-License-Identifier: Apache-2.0
"""``vllm serve``, by its console script, where the wheel was installed and nothing
else was done: it finds the plugin, serves golden texts, counts, and ends when told."""

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from transformers import AutoTokenizer

from tests.drafts import copy_draft
from tests.engines import BYTES4, domino_job, environment, start_engine
from tests.environments import build_wheel, make_environment
from vllm_domino.server import ACCEPTED_AT, VllmServer

pytestmark = pytest.mark.engine

# No hub can be reached: a draft named by hub id comes from a cache laid out as a hub's.
HUB_ID = "someone/bytes4-domino"
ARGUMENTS = ["--dtype", "float32", "--max-model-len", "512"]
REQUEST_TIMEOUT_S = 300


def hub_cache(folder: Path, draft: Path) -> dict[str, str]:
    """Puts a draft in a hub cache; the variables that make it the one in use."""
    commit = "0" * 40
    model = folder / "hub" / f"models--{HUB_ID.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    copy_draft(draft, model / "snapshots" / commit)
    return {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``vllm`` script of an environment that has our wheel, not this checkout."""
    folder = tmp_path_factory.mktemp("serve")
    return make_environment(folder / "venv", build_wheel(folder / "wheel")).with_name(
        "vllm"
    )


@pytest.fixture(scope="module")
def server(
    vllm: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("server")
    variables = hub_cache(folder / "hf", BYTES4.draft)
    variables["VLLM_CPU_KVCACHE_SPACE"] = "1"
    started = VllmServer(
        str(BYTES4.target),
        {"method": "domino", "model": HUB_ID},
        folder / "server.log",
        ARGUMENTS,
        variables,
        vllm,
    )
    with started:
        started.wait_ready()
        yield started


@pytest.fixture(scope="module")
def golden_texts() -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(BYTES4.target)
    return [tokenizer.decode(output) for output in BYTES4.golden["outputs"]]


@pytest.fixture(scope="module")
def prompt_texts() -> list[str]:
    return [bytes(prompt).decode() for prompt in BYTES4.prompts]


def body(prompt: str, **extra: Any) -> dict[str, Any]:
    return {
        "model": str(BYTES4.target),
        "prompt": prompt,
        "max_tokens": BYTES4.golden["max_tokens"],
        "temperature": 0,
        "ignore_eos": True,
        **extra,
    }


def complete(server: VllmServer, prompt: str) -> str:
    url = f"{server.url}/v1/completions"
    answer = httpx.post(url, json=body(prompt), timeout=REQUEST_TIMEOUT_S)
    answer.raise_for_status()
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_one_request_and_then_sixteen_at_once_give_the_golden_texts_and_counts(
    server: VllmServer, prompt_texts: list[str], golden_texts: list[str]
) -> None:
    assert complete(server, prompt_texts[0]) == golden_texts[0]
    before = server.spec_decode_counters()
    with ThreadPoolExecutor(len(prompt_texts)) as pool:
        texts = list(pool.map(lambda prompt: complete(server, prompt), prompt_texts))
    assert texts == golden_texts
    after = server.spec_decode_counters()
    counted = {name: after[name] - before[name] for name in after}
    golden = BYTES4.golden
    assert counted["num_drafts"] == golden["drafts"]
    assert counted["num_accepted_tokens"] == golden["accepted"]
    for position, accepted in enumerate(golden["accepted_per_pos"]):
        assert counted[f"{ACCEPTED_AT}{position}"] == accepted


def test_a_streamed_answer_comes_in_pieces_and_is_the_golden_text(
    server: VllmServer, prompt_texts: list[str], golden_texts: list[str]
) -> None:
    pieces = []
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json=body(prompt_texts[3], stream=True),
        timeout=REQUEST_TIMEOUT_S,
    ) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
    assert "".join(pieces) == golden_texts[3]
    assert len(pieces) > 5


def test_the_log_says_once_what_drafts(server: VllmServer) -> None:
    lines = [x for x in server.log.read_text().splitlines() if "Domino: draft" in x]
    assert len(lines) == 1
    assert HUB_ID in lines[0]
    assert "num_speculative_tokens 8" in lines[0]


def test_sigterm_ends_it_cleanly(server: VllmServer) -> None:
    """Last of those that use the server."""
    assert server.is_ready()
    processes = psutil.Process(server.process.pid).children(recursive=True)
    assert len(processes) >= 2  # the engine core and its worker
    assert server.stop() == 0
    assert "Application shutdown complete" in server.log.read_text()
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == []


def test_a_bad_setting_ends_the_command_with_one_sentence(vllm: Path) -> None:
    settings = {
        "method": "domino",
        "model": str(BYTES4.draft),
        "num_speculative_tokens": 9,
    }
    command = [str(vllm), "serve", str(BYTES4.target), *ARGUMENTS]
    process = subprocess.run(
        [*command, "--speculative-config", json.dumps(settings)],
        capture_output=True,
        text=True,
        env=environment("v1"),
        timeout=REQUEST_TIMEOUT_S,
    )
    assert process.returncode != 0
    last_line = process.stderr.strip().splitlines()[-1]
    assert "num_speculative_tokens is 9" in last_line
    assert "Set at most 8, or leave it out." in last_line


def test_weights_that_come_from_a_hub_are_checked_as_they_load(tmp_path: Path) -> None:
    def lose_a_tensor(tensors: dict[str, Any]) -> None:
        del tensors["prefix_gru.weight_hh_l0"]

    broken = copy_draft(BYTES4.draft, tmp_path / "draft", edit_tensors=lose_a_tensor)
    job = domino_job(BYTES4.target, Path(HUB_ID), [BYTES4.prompts], 4)
    variables = hub_cache(tmp_path / "hf", broken)
    process, _ = start_engine(job, "v1", env=variables)
    assert process.returncode != 0
    message = "CheckpointError: someone/bytes4-domino: no tensor"
    assert f"{message} 'prefix_gru.weight_hh_l0' in the weights" in process.stderr
