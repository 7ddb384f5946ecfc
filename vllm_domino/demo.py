# SPDX-License-Identifier: Apache-2.0
"""The main job, shown: the same target served with and without Domino, side by side.

Two real ``vllm serve`` processes answer the same requests in turn, so that what is
compared ran on the same machine in the same minute.
"""

import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import OpenAI
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from vllm_domino.server import ACCEPTED_AT, VllmServer

MAX_TOKENS = 100
ROUNDS = 3  # of each server, in turn
_POLL_S = 0.5
# Small enough to share a laptop; a user's own setting wins.
_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}


@dataclass
class Side:
    """One of the two servers and what it answered."""

    name: str
    server: VllmServer
    texts: list[str] = field(default_factory=list)
    # Requests at once -> tokens/s of each round.
    tokens_per_s: dict[int, list[float]] = field(default_factory=dict)

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.server.url}/v1", api_key="none")


def run(
    console: Console,
    target: str,
    speculative_config: dict[str, Any],
    prompts: list[Any],
    arguments: list[str],
) -> bool:
    """Serves, asks, measures and prints; whether both texts were equal."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-domino-demo-"))
    console.print(f"[bold]vllm serve[/] {target} {' '.join(arguments)}", soft_wrap=True)
    console.print(
        f"  --speculative-config '{json.dumps(speculative_config)}'", soft_wrap=True
    )
    console.print(f"  logs in {folder}\n", style="dim", soft_wrap=True)
    with ExitStack() as stack:
        plain, domino = (
            Side(
                name,
                stack.enter_context(
                    VllmServer(
                        target,
                        config,
                        folder / f"{name}.log",
                        arguments,
                        _ENVIRONMENT,
                    )
                ),
            )
            for name, config in (("plain", None), ("domino", speculative_config))
        )
        _wait(console, [plain, domino])
        _stream(console, domino, target, prompts[0])
        with _progress(console) as progress:
            task = progress.add_task("rounds", total=2 * 2 * (ROUNDS + 1))
            for round_number in range(ROUNDS + 1):
                for at_once in (1, len(prompts)):
                    for side in (plain, domino):
                        _ask(side, target, prompts, at_once, timed=round_number > 0)
                        progress.advance(task)
        _report(console, plain, domino)
        return plain.texts == domino.texts


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description} {task.completed}/{task.total}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def _wait(console: Console, sides: list[Side]) -> None:
    with _progress(console) as progress:
        task = progress.add_task("servers up", total=len(sides))
        waiting = list(sides)
        while waiting:
            waiting = [side for side in waiting if not side.server.is_ready()]
            progress.update(task, completed=len(sides) - len(waiting))
            time.sleep(_POLL_S)


def _stream(console: Console, side: Side, target: str, prompt: Any) -> None:
    """Prints the first answer as its tokens come."""
    console.print("[bold]The first answer, streamed:[/]")
    if _is_chat(prompt):
        console.print(f"user: {prompt[-1]['content']}", style="bold", markup=False)
    for chunk in _create(side.client, target, prompt, stream=True):
        choice = chunk.choices[0]
        text = choice.delta.content if _is_chat(prompt) else choice.text
        console.print(text or "", end="", markup=False, highlight=False)
    console.print("\n")


def _is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of messages, not a text or token ids."""
    return isinstance(prompt, list) and isinstance(prompt[0], dict)


def _create(client: OpenAI, target: str, prompt: Any, stream: bool) -> Any:
    settings: dict[str, Any] = {
        "model": target,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": stream,
    }
    if _is_chat(prompt):
        return client.chat.completions.create(messages=prompt, **settings)
    return client.completions.create(prompt=prompt, **settings)


def _ask(
    side: Side, target: str, prompts: list[Any], at_once: int, timed: bool
) -> None:
    """Sends every prompt, so many at once; alone, a quarter of them is enough."""
    client = side.client
    asked = prompts if at_once > 1 else prompts[: max(1, len(prompts) // 4)]

    def ask(prompt: Any) -> tuple[str, int]:
        answer = _create(client, target, prompt, stream=False)
        choice = answer.choices[0]
        text = choice.message.content if _is_chat(prompt) else choice.text
        return text or "", answer.usage.completion_tokens

    start = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(ask, asked))
    seconds = time.perf_counter() - start
    if asked is prompts:
        side.texts = [text for text, _ in answers]
    if timed:
        rate = sum(tokens for _, tokens in answers) / seconds
        side.tokens_per_s.setdefault(at_once, []).append(rate)


def _report(console: Console, plain: Side, domino: Side) -> None:
    table = Table(title=f"tokens/s, greedy, {MAX_TOKENS} tokens a request")
    for column in ("requests at once", "plain", "Domino", "speed-up"):
        table.add_column(column, justify="right")
    for at_once, rates in plain.tokens_per_s.items():
        drafted = domino.tokens_per_s[at_once]
        ratio = statistics.median(drafted) / statistics.median(rates)
        table.add_row(str(at_once), _range(rates), _range(drafted), f"{ratio:.2f}x")
    console.print(table)
    console.print(f"median of {ROUNDS} rounds in turn (lowest - highest)", style="dim")
    counters = domino.server.spec_decode_counters()
    drafts, accepted = counters["num_drafts"], counters["num_accepted_tokens"]
    console.print(f"acceptance length: {1 + accepted / drafts:.2f} tokens a step")
    positions = [name for name in counters if name.startswith(ACCEPTED_AT)]
    by_position = [
        counters[f"{ACCEPTED_AT}{i}"] / drafts for i in range(len(positions))
    ]
    shown = " ".join(f"{rate:.2f}" for rate in by_position)
    console.print(f"accepted by position: {shown}")
    same = sum(a == b for a, b in zip(plain.texts, domino.texts, strict=True))
    verdict = "equal" if same == len(plain.texts) else "NOT EQUAL"
    console.print(
        f"texts with and without Domino: {verdict} ({same} of {len(plain.texts)})"
    )


def _range(rates: list[float]) -> str:
    return f"{statistics.median(rates):.0f} ({min(rates):.0f} - {max(rates):.0f})"
