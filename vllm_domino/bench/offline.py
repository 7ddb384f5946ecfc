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
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import Progress

from vllm_domino.bench.methods import Method
from vllm_domino.bench.prompts import rendered
from vllm_domino.bench.result import (
    Report,
    Row,
    Run,
    machine,
    percentiles,
    same_outputs,
)
from vllm_domino.bench.work import Work, arguments
from vllm_domino.errors import DominoError

_STOP_TIMEOUT_S = 60.0
_LOG_TAIL = 3000  # characters of the log that an error shows
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._answers.close()
        if kind is not None:
            self._process.terminate()
        self._process.stdin.close()  # the end of its work
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def answer(self) -> dict[str, Any]:
        """What it says next."""
        line = self._answers.readline()
        if not line:
            status = self._process.wait()
            raise EngineError(
                f"the engine for {self.method.name} ended with status {status}; the "
                f"end of its log ({self._log}):\n{self._log.read_text()[-_LOG_TAIL:]}"
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
    runs: dict[tuple[str, int], list[Run]] = {}
    outputs: dict[str, list[list[int]]] = {}
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
            engines.append(stack.enter_context(Engine(method, settings, log)))
            # One after the other: each measures the memory that is left.
            engines[-1].answer()
            progress.advance(task)

        def turn(at_once: int, prompts: list[list[int]], keep: bool) -> None:
            for engine in engines:
                found = engine.ask(job | {"prompts": prompts, "at_once": at_once})
                if keep:
                    name = engine.method.name
                    runs.setdefault((name, at_once), []).append(_run(found))
                    outputs.setdefault(name, found["tokens"])
                progress.advance(task)

        rounds = (1 + work.repeats) * len(work.at_once) * len(engines)
        task = progress.add_task("rounds", total=rounds)
        _rounds(work, ids, turn)
    same = same_outputs(outputs) if work.temperature == 0 else {}
    rows = [
        Row(method.name, at_once, runs[method.name, at_once])
        for at_once in work.at_once
        for method in methods
    ]
    count = len(work.prompts)
    return Report(command, work.target, prompts, machine(), rows, count, same)


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
    positions = [
        name for name in counters if name.startswith("num_accepted_tokens_per")
    ]
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
