# SPDX-License-Identifier: Apache-2.0
"""``vllm-domino serve`` and ``generate``: a speculative config filled in, and then
vLLM's own command and ``LLM``. Flags that are not ours go to vLLM as they are."""

import json
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_domino.draft import Draft
from vllm_domino.errors import DraftConfigError

_OURS = ("--speculative-config", "-sc", "--speculative_config")


@dataclass(frozen=True)
class Choice:
    """What a user says of the draft; None where vLLM-Domino decides."""

    draft: str
    num_speculative_tokens: int | None = None
    draft_sample_method: str | None = None
    draft_block: str | None = None
    revision: str | None = None

    def settings(self) -> dict[str, Any]:
        """The speculative config."""
        chosen = {
            "num_speculative_tokens": self.num_speculative_tokens,
            "draft_sample_method": self.draft_sample_method,
            "draft_block": self.draft_block,
            "revision": self.revision,
        }
        return {"method": "domino", "model": self.draft} | {
            key: value for key, value in chosen.items() if value is not None
        }


def target_of(target: str | None, choice: Choice) -> str:
    """The target that was named, or the one that the draft names.

    Raises:
        DominoError: Neither does, or the draft cannot be used.
    """
    draft = Draft.open(choice.draft, choice.revision)
    if target is not None:
        return target
    if draft.verifier is None:
        raise DraftConfigError(
            f"{choice.draft}: config.json does not say which target it is for (only "
            "speculators' layout does). Name the target: vllm-domino serve TARGET "
            f"--draft {choice.draft}"
        )
    return draft.verifier


def serve_command(target: str, choice: Choice, arguments: Sequence[str]) -> list[str]:
    """The ``vllm serve`` that is run."""
    refuse_ours(arguments)
    script = Path(sys.executable).parent / "vllm"
    settings = json.dumps(choice.settings(), ensure_ascii=False)
    command = [str(script), "serve", target, "--speculative-config", settings]
    return [*command, *arguments]


def shown(command: Sequence[str]) -> str:
    """A command as one would type it."""
    return shlex.join(["vllm", *command[1:]])


def serve(command: Sequence[str]) -> None:
    """Becomes that process: signals and exit status are vLLM's own."""
    os.execv(command[0], list(command))


@dataclass(frozen=True)
class Answer:
    prompt: str
    text: str


@dataclass(frozen=True)
class Answers:
    """
    Attributes:
        acceptance_length: Tokens a step, 1 without drafts; None if nothing was drafted.
    """

    answers: list[Answer]
    acceptance_length: float | None

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)


def read_prompts(given: list[str], file: Path | None) -> list[str]:
    """Those given one by one, then those of a JSON file.

    Raises:
        DraftConfigError: There are none, or the file holds something else.
    """
    found = list(given)
    if file is not None:
        try:
            listed = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DraftConfigError(f"{file}: not JSON ({error}).") from None
        if not isinstance(listed, list) or not all(isinstance(p, str) for p in listed):
            raise DraftConfigError(
                f'{file}: expected a JSON list of texts: ["...", ...].'
            )
        found += listed
    if not found:
        raise DraftConfigError("There is no prompt. Pass --prompt or --prompts.")
    return found


def generate(
    target: str,
    choice: Choice,
    prompts: list[str],
    sampling: dict[str, Any],
    arguments: Sequence[str],
) -> Answers:
    """Answers prompts through vLLM's ``LLM``, as chat where the target has a template.

    Args:
        sampling: For vLLM's ``SamplingParams``.
        arguments: vLLM's engine flags, as ``vllm serve`` takes them.
    """
    from vllm import LLM, SamplingParams

    given = engine_settings(target, arguments)
    llm = LLM(**given, speculative_config=choice.settings(), disable_log_stats=False)
    params = SamplingParams(**sampling)
    if llm.get_tokenizer().chat_template:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(chats, params)
    else:
        outputs = llm.generate(prompts, params)
    answers = [
        Answer(prompt, output.outputs[0].text)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    return Answers(answers, _acceptance_length(llm.get_metrics()))


def engine_settings(target: str, arguments: Sequence[str]) -> dict[str, Any]:
    """vLLM's engine flags, as ``vllm serve`` takes them, as an ``LLM`` takes them."""
    refuse_ours(arguments)
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm-domino"))
    parsed = parser.parse_args(["--model", target, *arguments])
    return {
        name: value
        for name, value in vars(EngineArgs.from_cli_args(parsed)).items()
        if name not in ("speculative_config", "disable_log_stats")
    }


def _acceptance_length(metrics: Iterable[Any]) -> float | None:
    counts = {metric.name: getattr(metric, "value", 0) for metric in metrics}
    drafts = counts.get("vllm:spec_decode_num_drafts", 0)
    accepted = counts.get("vllm:spec_decode_num_accepted_tokens", 0)
    return 1 + float(accepted) / drafts if drafts else None


def refuse_ours(arguments: Sequence[str]) -> None:
    for argument in arguments:
        if argument.split("=")[0] in _OURS:
            raise DraftConfigError(
                f"{argument.split('=')[0]} is what this command fills in. Use its own "
                "options here, or call vllm serve yourself."
            )
