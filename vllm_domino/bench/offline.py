# SPDX-License-Identifier: Apache-2.0
"""``vllm-domino bench offline``: methods side by side through vLLM's own ``LLM``.

Each method has an engine in a process of its own; they answer the same prompts in
turns, round after round, so that all see the same machine.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from vllm_domino.bench.methods import Method
from vllm_domino.bench.prompts import rendered
from vllm_domino.bench.result import Collected, Report, Run, percentiles
from vllm_domino.bench.work import Work, arguments, report_of
from vllm_domino.errors import DominoError
from vllm_domino.server import ACCEPTED_AT, end_of_log

_STOP_TIMEOUT_S = 60.0
# Prompts that are answered before the first round, untimed.
_WARM_UP = 2


class EngineError(DominoError):
    """An engine did not start, or ended; the message holds its log's end."""


class Engine:
    """A method's engine process; see ``vllm_domino.bench.engine``."""

    def __init__(self, method: Method, settings: dict[str, Any], log: Path) -> None:
        self.method = method
        self._log = log
        settings_file = log.with_suffix(".json")
        settings_file.write_text(json.dumps(settings))
        mine, theirs = os.pipe()
        command = [sys.executable, "-m", "vllm_domino.bench.engine"]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, str(settings_file), str(theirs)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs,),
                text=True,
            )
        os.close(theirs)
        self._answers = os.fdopen(mine)

    def close(self) -> None:
        """Lets it end, once it has done what it was asked."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def answer(self) -> dict[str, Any]:
        """What it says next."""
        line = self._answers.readline()
        if not line:
            status = self._process.wait()
            raise EngineError(
                f"the engine for {self.method.name} ended with status {status}; "
                f"{end_of_log(self._log)}"
            )
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self.answer()


def run(
    console: Console, work: Work, methods: list[Method], prompts: str, command: str
) -> Report:
    """Runs every method, and reports.

    Args:
        prompts: What the prompts are called in the report.
        command: What was typed.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(work.target)
    texts = rendered(work.prompts, tokenizer)
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    folder = Path(tempfile.mkdtemp(prefix="vllm-domino-bench-"))
    console.print(f"logs in {folder}", style="dim", soft_wrap=True)
    job = {
        "max_tokens": work.max_tokens,
        "temperature": work.temperature,
        "ignore_eos": work.ignore_eos,
    }
    collected = Collected()
    with ExitStack() as stack, Progress(console=console, transient=True) as progress:
        task = progress.add_task("engines start", total=len(methods))
        engines = []
        for i, method in enumerate(methods):
            log = folder / f"engine-{i}.log"
            settings = {
                "target": work.target,
                "arguments": arguments(work, len(methods)),
                "speculative_config": method.config,
            }
            engine = Engine(method, settings, log)
            engines.append(stack.enter_context(closing(engine)))
            # One after the other: each measures the memory that is left.
            engines[-1].answer()
            progress.advance(task)

        def turn(at_once: int, prompts: list[list[int]], keep: bool) -> None:
            for engine in engines:
                found = engine.ask(job | {"prompts": prompts, "at_once": at_once})
                if keep:
                    name, tokens = engine.method.name, found["tokens"]
                    collected.add(name, at_once, _run(found), tokens)
                progress.advance(task)

        rounds = (1 + work.repeats) * len(work.at_once) * len(engines)
        task = progress.add_task("rounds", total=rounds)
        _rounds(work, ids, turn)
    return report_of(work, prompts, command, collected)


def _rounds(
    work: Work,
    ids: list[list[int]],
    turn: Callable[[int, list[list[int]], bool], None],
) -> None:
    for at_once in work.at_once:
        turn(at_once, ids[: max(at_once, _WARM_UP)], False)
    for _ in range(work.repeats):
        for at_once in work.at_once:
            turn(at_once, ids, True)


def _run(found: dict[str, Any]) -> Run:
    counters = found["counters"]
    steps = found["split"].pop("steps")
    positions = [name for name in counters if name.startswith(ACCEPTED_AT)]
    return Run(
        tokens_per_s=sum(map(len, found["tokens"])) / found["seconds"],
        ttft=percentiles(found["ttft"]),
        tpot=percentiles(found["tpot"]),
        drafts=int(counters.get("num_drafts", 0)),
        drafted=int(counters.get("num_draft_tokens", 0)),
        accepted=int(counters.get("num_accepted_tokens", 0)),
        accepted_at=[int(counters[name]) for name in positions],
        split={k: v / steps for k, v in found["split"].items()} if steps else {},
    )
