# SPDX-License-Identifier: Apache-2.0
"""Prompts answered by the target itself, through vLLM: what a draft trains on.

Resumable: answers are appended as they come, and those that are there are not asked
for again.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from vllm_domino.training.data import read_lines
from vllm_domino.training.recipe import RecipeError

_BATCH = 256  # prompts handed to vLLM between two writes


def read_prompts(source: str, split: str, field: str | None) -> list[Any]:
    """Prompts of a JSONL file or a Hugging Face dataset: texts, or lists of messages.

    Args:
        source: A ``.jsonl`` file, or a dataset's name.
        split: Which split of a dataset.
        field: Where a row holds its prompt; "messages", "prompt" or "text", whichever
            is there, if not given.

    Raises:
        RecipeError: A row holds no prompt; names the line.
    """
    return [
        _prompt(row, field, f"{source}:{number}")
        for number, row in _rows(source, split)
    ]


def _rows(source: str, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
    if source.endswith((".jsonl", ".json")) or Path(source).exists():
        yield from read_lines(Path(source))
        return
    from datasets import load_dataset

    yield from enumerate(load_dataset(source, split=split), start=1)


def _prompt(row: dict[str, Any], field: str | None, where: str) -> Any:
    names = (field,) if field else ("messages", "prompt", "text")
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and value:
            return value
        if isinstance(value, list) and value:
            # What follows the last question is another model's answer.
            while value and value[-1].get("role") == "assistant":
                value = value[:-1]
            if value:
                return value
    raise RecipeError(
        f"{where}: no prompt in {' or '.join(map(repr, names))}; expected a text or a "
        "list of chat messages."
    )


def answer_prompts(
    target: str,
    prompts: list[Any],
    output: Path,
    console: Console,
    max_tokens: int,
    temperature: float,
    seed: int,
    engine: dict[str, Any],
) -> int:
    """Writes each prompt's answer to ``output``; how many are there at the end."""
    done = _finished(output)
    waiting = [i for i in range(len(prompts)) if i not in done]
    if done:
        console.print(
            f"{output}: {len(done)} answers are there, {len(waiting)} to go",
            soft_wrap=True,
        )
    if not waiting:
        return len(done)
    from vllm import LLM

    llm = LLM(model=target, seed=seed, **engine)
    try:
        _answer(llm, prompts, waiting, output, console, max_tokens, temperature, seed)
    finally:
        llm.llm_engine.engine_core.shutdown()
    return len(prompts)


def _answer(
    llm: Any,
    prompts: list[Any],
    waiting: list[int],
    output: Path,
    console: Console,
    max_tokens: int,
    temperature: float,
    seed: int,
) -> None:
    from vllm import SamplingParams

    tokenizer = llm.get_tokenizer()
    progress = Progress(
        "answers",
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    with progress, output.open("a", encoding="utf-8") as file:
        task = progress.add_task(
            "", total=len(prompts), completed=len(prompts) - len(waiting)
        )
        for start in range(0, len(waiting), _BATCH):
            chosen = waiting[start : start + _BATCH]
            inputs = [
                {"prompt_token_ids": _encode(tokenizer, prompts[i])} for i in chosen
            ]
            sampling = [
                SamplingParams(
                    temperature=temperature, max_tokens=max_tokens, seed=seed + i
                )
                for i in chosen
            ]
            outputs = llm.generate(inputs, sampling, use_tqdm=False)
            for i, answer in zip(chosen, outputs, strict=True):
                row = {
                    "index": i,
                    "prompt_ids": list(answer.prompt_token_ids),
                    "answer_ids": list(answer.outputs[0].token_ids),
                }
                file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
            progress.advance(task, len(chosen))


def _encode(tokenizer: Any, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        ids: list[int] = tokenizer(prompt)["input_ids"]
        return ids
    encoded: list[int] = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return encoded


def _finished(output: Path) -> set[int]:
    """Which prompts have answers; a last line cut off by a kill is taken away."""
    if not output.is_file():
        return set()
    kept, done = [], set()
    for line in output.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            kept.append(line)
    text = "".join(kept)
    if output.stat().st_size != len(text.encode()):
        output.write_text(text, encoding="utf-8")
    if text:
        done = {row["index"] for _, row in read_lines(output)}
    return done
