# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` in both runners: streamed, 64 clients at once, two replicas."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from tests.engines import BYTES4, environment
from vllm_domino.server import VllmServer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CLIENTS = 64
MAX_TOKENS = 16
TIMEOUT_S = 600
ARGUMENTS = ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
CONFIG = {"method": "domino", "model": str(BYTES4.draft)}
RUNNERS = ("v1", "v2")


def _serve(
    runner: str, tmp_path_factory: pytest.TempPathFactory, *arguments: str, **env: str
) -> VllmServer:
    log = tmp_path_factory.mktemp("server") / "server.log"
    return VllmServer(
        str(BYTES4.target),
        CONFIG,
        log,
        [*ARGUMENTS, *arguments],
        environment(runner) | env,
    )


@pytest.fixture(scope="module", params=RUNNERS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    with _serve(request.param, tmp_path_factory) as started:
        started.wait_ready()
        yield started


@pytest.fixture(scope="module")
def golden_texts() -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(BYTES4.target)
    return [tokenizer.decode(out[:MAX_TOKENS]) for out in BYTES4.golden["outputs"]]


def ask(server: VllmServer, number: int) -> str:
    """The streamed answer to one of the pair's prompts, put together again."""
    body: dict[str, Any] = {
        "model": str(BYTES4.target),
        "prompt": bytes(BYTES4.prompts[number % len(BYTES4.prompts)]).decode(),
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    url = f"{server.url}/v1/completions"
    pieces = []
    with httpx.stream("POST", url, json=body, timeout=TIMEOUT_S) as stream:
        stream.raise_for_status()
        for line in stream.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
    assert len(pieces) > 1
    return "".join(pieces)


@pytest.mark.support("vllm serve, streamed")
def test_a_streamed_answer(server: VllmServer, golden_texts: list[str]) -> None:
    assert ask(server, 3) == golden_texts[3]


@pytest.mark.support("vllm serve, 64 clients at once")
def test_many_clients_at_once(server: VllmServer, golden_texts: list[str]) -> None:
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda i: ask(server, i), range(CLIENTS)))
    assert answers == [golden_texts[i % len(golden_texts)] for i in range(CLIENTS)]
    assert server.spec_decode_counters()["num_accepted_tokens"] > 0


@pytest.mark.support("data parallel 2")
@pytest.mark.parametrize("runner", RUNNERS)
def test_two_replicas(
    runner: str, tmp_path_factory: pytest.TempPathFactory, golden_texts: list[str]
) -> None:
    # vLLM binds each replica to cores; this machine has two.
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    arguments = ("--data-parallel-size", "2")
    with _serve(runner, tmp_path_factory, *arguments, **binding) as server:
        server.wait_ready()
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda i: ask(server, i), range(16)))
        assert answers == golden_texts
        assert server.spec_decode_counters()["num_accepted_tokens"] > 0
