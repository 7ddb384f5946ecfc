# SPDX-License-Identifier: Apache-2.0
"""``vllm-domino bench serve``: methods side by side through ``vllm serve``, each asked
by ``vllm bench serve``, in turns."""

import json
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from vllm_domino.bench.methods import Method
from vllm_domino.bench.prompts import rendered
from vllm_domino.bench.result import Collected, Report, Run
from vllm_domino.bench.work import Work, arguments, report_of
from vllm_domino.errors import DominoError
from vllm_domino.server import VllmServer

_POLL_S = 0.5
_OUTPUT_TAIL = 3000  # characters of the client's output that an error shows


class ClientError(DominoError):
    """``vllm bench serve`` failed; the message holds the end of what it said."""


def run(
    console: Console, work: Work, methods: list[Method], prompts: str, command: str
) -> Report:
    """Serves every method, asks each in turn, and reports.

    Args:
        prompts: What the prompts are called in the report.
        command: What was typed.
    """
    from transformers import AutoTokenizer

    folder = Path(tempfile.mkdtemp(prefix="vllm-domino-bench-"))
    console.print(f"logs in {folder}", style="dim", soft_wrap=True)
    questions = folder / "prompts.jsonl"
    asked = rendered(work.prompts, AutoTokenizer.from_pretrained(work.target))
    questions.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in asked))
    collected = Collected()
    with ExitStack() as stack, Progress(console=console, transient=True) as progress:
        task = progress.add_task("servers start", total=len(methods))
        servers = []
        for i, method in enumerate(methods):
            server = VllmServer(
                work.target,
                method.config,
                folder / f"server-{i}.log",
                arguments(work, len(methods)),
            )
            servers.append(stack.enter_context(server))
            # One after the other: each measures the memory that is left.
            while not server.is_ready():
                time.sleep(_POLL_S)
            progress.advance(task)
        total = (1 + work.repeats) * len(work.at_once) * len(methods)
        task = progress.add_task("rounds", total=total)
        for repeat in range(work.repeats + 1):
            for at_once in work.at_once:
                for method, server in zip(methods, servers, strict=True):
                    file = folder / f"{server.port}-{at_once}-{repeat}.json"
                    # The first round warms up.
                    count = len(asked) if repeat else min(at_once, len(asked))
                    found = _ask(server, work, questions, count, at_once, file)
                    if repeat:
                        texts = found["generated_texts"]
                        collected.add(method.name, at_once, _run(found), texts)
                    progress.advance(task)
    return report_of(work, prompts, command, collected)


def _ask(
    server: VllmServer,
    work: Work,
    questions: Path,
    count: int,
    at_once: int,
    file: Path,
) -> dict[str, Any]:
    assert isinstance(server.process.args, list)
    command = [server.process.args[0], "bench", "serve"]
    command += ["--backend", "openai", "--base-url", server.url]
    command += ["--endpoint", "/v1/completions", "--model", work.target]
    command += ["--dataset-name", "custom", "--dataset-path", str(questions)]
    # They went through the chat template already, with its special tokens.
    command += ["--skip-chat-template", "--disable-shuffle"]
    command += ["--extra-body", json.dumps({"add_special_tokens": False})]
    command += ["--custom-output-len", str(work.max_tokens)]
    command += ["--num-prompts", str(count), "--max-concurrency", str(at_once)]
    command += ["--temperature", str(work.temperature), "--disable-tqdm"]
    command += ["--metric-percentiles", "50,99"]
    command += ["--save-result", "--save-detailed", "--result-filename", str(file)]
    if work.ignore_eos:
        command += ["--ignore-eos"]
    done = subprocess.run(command, capture_output=True, text=True)
    output = done.stdout + done.stderr
    if done.returncode or not file.is_file():
        raise ClientError(f"vllm bench serve failed:\n{output[-_OUTPUT_TAIL:]}")
    found: dict[str, Any] = json.loads(file.read_text())
    if found["completed"] < count:
        raise ClientError(
            f"vllm bench serve: {count - found['completed']} of {count} requests "
            f"failed; the server's log is {server.log}:\n{output[-_OUTPUT_TAIL:]}"
        )
    return found


def _run(found: dict[str, Any]) -> Run:
    drafts = int(found.get("spec_decode_num_drafts", 0))
    rates = found.get("spec_decode_per_position_acceptance_rates") or []
    return Run(
        tokens_per_s=found["output_throughput"],
        ttft=_percentiles(found, "ttft"),
        tpot=_percentiles(found, "tpot"),
        itl=_percentiles(found, "itl"),
        drafts=drafts,
        drafted=int(found.get("spec_decode_draft_tokens", 0)),
        accepted=int(found.get("spec_decode_accepted_tokens", 0)),
        accepted_at=[round(rate * drafts) for rate in rates],
    )


def _percentiles(found: dict[str, Any], name: str) -> dict[str, float]:
    return {p: found[f"{p}_{name}_ms"] / 1e3 for p in ("p50", "p99")}
