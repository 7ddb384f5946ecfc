# SPDX-License-Identifier: Apache-2.0
"""Random requests for as long as you like: of all lengths and temperatures, aborted and
preempted, with every greedy answer checked and nothing left behind.

    python -m tests.soak --minutes 30 [--report FILE]

The runner is chosen by the environment, as for vLLM; ``make soak`` runs both. The exit
status is 1 if an answer was wrong, a KV block stayed allocated, or memory grew.
"""

import ctypes
import gc
import json
import os
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# oneDNN keeps a kernel for each batch size it meets, up to a thousand: on a CPU memory
# grows for an hour, with Domino or without, and would hide a leak.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")

import psutil
import typer
from vllm import LLM, SamplingParams

from tests.engine_process import counters
from tests.features import PAIR

SLOTS = 8
QUEUE = 24  # requests waiting or running
# Few enough that running requests are preempted.
NUM_BLOCKS = 26
BLOCK_SIZE = 32
ABORTED = 0.1  # of all requests
GREEDY = 0.5
WARM_UP = 1 / 3  # of the time, before memory is compared
MOST_GROWTH = 0.02
REPORT_EVERY_S = 60


@dataclass
class Tally:
    """What the soak has seen."""

    finished: int = 0
    aborted: int = 0
    greedy_right: int = 0
    greedy_wrong: int = 0
    tokens: int = 0
    preemptions: int = 0
    drafts: int = 0
    accepted: int = 0
    leaked_blocks: int = 0
    memory_mib: list[float] = field(default_factory=list)
    growth: float = 0.0

    @property
    def passed(self) -> bool:
        return (
            self.greedy_right > 0
            and self.greedy_wrong == 0
            and self.leaked_blocks == 0
            and self.growth < MOST_GROWTH
        )


class Soak:
    def __init__(self, seed: int, method: str) -> None:
        self.random = random.Random(seed)
        self.llm = LLM(
            model=str(PAIR.target),
            speculative_config=None
            if method == "none"
            else {
                "method": "domino",
                "model": str(PAIR.draft),
                "draft_sample_method": method,
            },
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            disable_log_stats=False,
            max_model_len=256,
            max_num_seqs=SLOTS,
            max_num_batched_tokens=256,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=NUM_BLOCKS,
            enable_prefix_caching=True,
        )
        self.engine = self.llm.llm_engine
        self.tally = Tally()
        self._open: dict[str, tuple[int, SamplingParams]] = {}
        self._number = 0

    def run(self, seconds: float) -> Tally:
        start = time.monotonic()
        reported, warm = start, None
        while (now := time.monotonic()) - start < seconds:
            while len(self._open) < QUEUE:
                self._submit()
            self._step()
            if warm is None and now - start > seconds * WARM_UP:
                warm = self._memory()
            if now - reported > REPORT_EVERY_S:
                reported = now
                self.tally.memory_mib.append(round(self._memory(), 1))
                minutes = (now - start) / 60
                print(f"{minutes:.0f} min: {self._line()}", flush=True)
        while self._open:
            self._step()
        self._settle(warm or self._memory())
        return self.tally

    def _submit(self) -> None:
        prompt = self.random.randrange(len(PAIR.prompts))
        greedy = self.random.random() < GREEDY
        sampling = SamplingParams(
            temperature=0.0 if greedy else self.random.uniform(0.2, 1.6),
            top_p=self.random.choice([1.0, 0.9]),
            top_k=self.random.choice([0, 20]),
            max_tokens=self.random.randint(1, PAIR.golden["max_tokens"]),
            ignore_eos=True,
            detokenize=False,
        )
        name = str(self._number)
        self._number += 1
        inputs = {"prompt_token_ids": PAIR.prompts[prompt]}
        self.engine.add_request(name, inputs, sampling)
        self._open[name] = (prompt, sampling)

    def _step(self) -> None:
        for output in self.engine.step():
            if output.finished and output.request_id in self._open:
                self._check(output)
        if self._open and self.random.random() < ABORTED / 2:
            name = self.random.choice(list(self._open))
            self.engine.abort_request([name])
            del self._open[name]
            self.tally.aborted += 1

    def _check(self, output: Any) -> None:
        prompt, sampling = self._open.pop(output.request_id)
        tokens = list(output.outputs[0].token_ids)
        self.tally.finished += 1
        self.tally.tokens += len(tokens)
        if sampling.temperature > 0:
            return
        if tokens == PAIR.golden["outputs"][prompt][: sampling.max_tokens]:
            self.tally.greedy_right += 1
        else:
            self.tally.greedy_wrong += 1
            print(f"wrong: prompt {prompt}, {sampling}: {tokens}", flush=True)

    def _settle(self, warm: float) -> None:
        """Counts what is left when nobody is served any more."""
        for _ in range(3):
            self.engine.step()
        core = self.engine.engine_core.engine_core
        pool = core.scheduler.kv_cache_manager.block_pool
        # Block 0 is vLLM's null block, never free.
        self.tally.leaked_blocks = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        self.tally.growth = round(self._memory() / warm - 1, 4)
        seen = counters(self.llm)
        self.tally.preemptions = seen["num_preemptions"]
        self.tally.drafts = seen.get("num_drafts", 0)
        self.tally.accepted = seen.get("num_accepted_tokens", 0)

    def _memory(self) -> float:
        """Resident MiB, without what the C library only holds on to."""
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        resident: int = psutil.Process().memory_info().rss
        return resident / 2**20

    def _line(self) -> str:
        tally = self.tally
        return (
            f"{tally.finished} finished, {tally.aborted} aborted, greedy "
            f"{tally.greedy_right} right {tally.greedy_wrong} wrong, "
            f"{tally.memory_mib[-1]:.0f} MiB"
        )


def main(
    minutes: Annotated[float, typer.Option(help="How long.")] = 30.0,
    report: Annotated[Path | None, typer.Option(help="JSON of what was seen.")] = None,
    method: Annotated[
        str, typer.Option(help='draft_sample_method, or "none".')
    ] = "greedy",
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    tally = Soak(seed, method).run(minutes * 60)
    text = json.dumps(asdict(tally) | {"minutes": minutes, "passed": tally.passed})
    print(text)
    if report is not None:
        report.write_text(text + "\n")
    raise typer.Exit(0 if tally.passed else 1)


if __name__ == "__main__":
    typer.run(main)
