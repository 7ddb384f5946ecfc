# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own, for ``bench offline``: it is told by lines
of JSON what to run, and answers in lines of JSON.

    python -m vllm_domino.bench.engine ENGINE.json DESCRIPTOR

The engine core runs in this same process, so that the parts of a step can be timed.
Its log goes where the process's output goes; answers go to the open file DESCRIPTOR.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from vllm import LLM, SamplingParams

from vllm_domino.launch import engine_settings
from vllm_domino.server import SPEC_DECODE


class Clock:
    """Seconds spent in parts of the engine's steps, since it was last read."""

    def __init__(self, runner: Any) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._watch(runner, ("execute_model", "sample_tokens"), "step")
        proposer = getattr(runner, "drafter", getattr(runner, "speculator", None))
        if proposer is not None:
            self._watch(proposer, ("propose",), "propose")
            # The V1 runner's; V2's lies inside the captured draft step.
            self._watch(proposer, ("_sample_draft_tokens",), "head")

    def _watch(self, owner: Any, names: tuple[str, ...], part: str) -> None:
        for name in names:
            if (function := getattr(owner, name, None)) is not None:
                setattr(owner, name, self._timed(function, part))

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            _wait()
            start = time.perf_counter()
            result = function(*args, **kwargs)
            _wait()
            spent = time.perf_counter() - start
            self.seconds[part] = self.seconds.get(part, 0.0) + spent
            self.calls[part] = self.calls.get(part, 0) + 1
            return result

        return timed

    def read(self) -> dict[str, float]:
        """Seconds of verifying, of the draft's backbone and of its head."""
        found = self.seconds
        step, propose = found.get("step", 0.0), found.get("propose", 0.0)
        head = found.get("head", 0.0)
        steps = self.calls.get("propose", 0)
        self.seconds, self.calls = {}, {}
        return {
            "verify": step - propose,
            "draft": propose - head,
            "head": head,
            "steps": steps,
        }


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def model_runner(llm: LLM) -> Any:
    """vLLM's, of an engine whose core runs in this process."""
    core: Any = llm.llm_engine.engine_core
    return core.engine_core.model_executor.driver_worker.worker.model_runner


def run(llm: LLM, clock: Clock, job: dict[str, Any]) -> dict[str, Any]:
    """Answers prompts, so many at once, and says what it took."""
    sampling = SamplingParams(
        temperature=job["temperature"],
        max_tokens=job["max_tokens"],
        ignore_eos=job["ignore_eos"],
        detokenize=False,
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    before = counters(llm)
    clock.read()
    outputs, started = [], time.perf_counter()
    for start in range(0, len(prompts), job["at_once"]):
        some = prompts[start : start + job["at_once"]]
        outputs += llm.generate(some, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    after = counters(llm)
    return {
        "seconds": seconds,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "ttft": [output.metrics.first_token_latency for output in outputs],
        "tpot": [
            (output.metrics.last_token_ts - output.metrics.first_token_ts) / later
            for output in outputs
            if (later := len(output.outputs[0].token_ids) - 1) > 0
        ],
        "counters": {name: after[name] - before.get(name, 0) for name in after},
        "split": clock.read(),
    }


def counters(llm: LLM) -> dict[str, float]:
    """vLLM's speculative-decoding counters; those by position with it behind a dot."""
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        if not metric.name.startswith(SPEC_DECODE):
            continue
        name = metric.name.removeprefix(SPEC_DECODE)
        if hasattr(metric, "values"):
            found |= {f"{name}.{i}": value for i, value in enumerate(metric.values)}
        else:
            found[name] = metric.value
    return found


def main() -> None:
    engine_file, descriptor = sys.argv[1:]
    wanted = json.loads(Path(engine_file).read_text())
    llm = LLM(
        **engine_settings(wanted["target"], wanted["arguments"]),
        speculative_config=wanted["speculative_config"],
        disable_log_stats=False,
    )
    clock = Clock(model_runner(llm))
    with os.fdopen(int(descriptor), "w", buffering=1) as answers:
        answers.write(json.dumps({"ready": True}) + "\n")
        for line in sys.stdin:
            answers.write(json.dumps(run(llm, clock, json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
