# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own: reads a job, writes what it saw.

    python -m tests.engine_process JOB.json RESULT.json

The engine core runs in this same process, so that what the proposer drafts can be
recorded where it comes out, in both model runners.
"""

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from tests.capture import no_host_sync
from vllm_domino.bench.engine import model_runner


class Recorder:
    """Every block that was drafted, with the context it was drafted from."""

    def __init__(self, runner: Any) -> None:
        self.blocks: list[dict[str, Any]] = []
        self.hidden: dict[str, torch.Tensor] = {}
        self._runner = runner
        if hasattr(runner, "drafter"):
            self._proposer = runner.drafter
            self._record = self._record_v1
        else:
            self._proposer = runner.speculator
            self._record = self._record_v2
        self._propose = self._proposer.propose
        self._proposer.propose = self.propose
        self._draft = self._proposer.model.draft
        self._proposer.model.draft = self.draft

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = self._propose(*args, **kwargs)
        self._record(drafts, args, kwargs)
        return drafts

    def draft(self, *args: Any) -> torch.Tensor:
        """The draft step, under a guard that refuses what no CUDA graph could hold."""
        with no_host_sync():
            return self._draft(*args)

    def _record_v1(self, drafts: torch.Tensor, args: Any, kwargs: Any) -> None:
        metadata = kwargs["common_attn_metadata"]
        context = metadata.seq_lens.clone()
        if (rejected := kwargs.get("num_rejected_tokens_gpu")) is not None:
            context -= rejected
        req_ids = self._runner.input_batch.req_ids
        self._add(req_ids, context, kwargs["next_token_ids"], drafts)

    def _record_v2(self, drafts: torch.Tensor, args: Any, kwargs: Any) -> None:
        batch, num_rejected = args[0], args[6]
        if kwargs.get("dummy_run"):
            return
        count = batch.num_reqs
        context = batch.seq_lens[:count] - num_rejected[:count]
        rows = self._proposer.num_query_per_req
        bonus = self._proposer.input_buffers.input_ids[: count * rows : rows]
        self._add(batch.req_ids, context, bonus, drafts)

    def _add(self, req_ids: Any, context: Any, bonus: Any, drafts: Any) -> None:
        rows = zip(req_ids, context, bonus, drafts, strict=False)
        for req_id, ctx, first, tokens in rows:
            self.blocks.append(
                {
                    # vLLM may append a random suffix to the number it gave out.
                    "request": int(str(req_id).split("-")[0]),
                    "context": int(ctx),
                    "bonus": int(first),
                    "draft": tokens.tolist(),
                }
            )

    def watch_layers(self) -> None:
        """Keeps each layer's output, residual added, of every forward."""
        for index, layer in enumerate(self._proposer.model.model.layers):
            layer.register_forward_hook(self._keep(f"layer{index}"))

    def _keep(self, name: str) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            hidden, residual = output
            rows = (hidden + residual).clone()
            self.hidden[f"{name}.{sum(k.startswith(name) for k in self.hidden)}"] = rows

        return hook


def counters(llm: LLM) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for metric in llm.get_metrics():
        value = getattr(metric, "values", getattr(metric, "value", None))
        if metric.name.startswith("vllm:spec_decode"):
            seen[metric.name.removeprefix("vllm:spec_decode_")] = value
        elif metric.name == "vllm:num_preemptions":
            seen["num_preemptions"] = value
    return seen


def sampling_params(given: dict[str, Any]) -> SamplingParams:
    given = dict(given)
    if (constraint := given.pop("structured_outputs", None)) is not None:
        given["structured_outputs"] = StructuredOutputsParams(**constraint)
    return SamplingParams(**given)


def run_case(llm: LLM, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Prompts with sampling of their own: what each request came to."""
    lora = case.get("lora")
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in case["prompts"]],
        [sampling_params(given) for given in case["sampling"]],
        use_tqdm=False,
        lora_request=LoRARequest("adapter", 1, lora) if lora else None,
    )
    return [
        {
            "completions": [_completion(c) for c in output.outputs],
            "prompt_logprobs": _logprobs(output.prompt_logprobs),
            "cached_tokens": output.num_cached_tokens,
        }
        for output in outputs
    ]


def run_draws(llm: LLM, draws: dict[str, Any]) -> dict[str, int]:
    """How often each run of tokens 2 to 4 came, of many unseeded requests. The first
    token comes from the prompt's own step, and is not drafted."""
    sampling = sampling_params(
        draws["sampling"] | {"max_tokens": 4, "ignore_eos": True, "detokenize": False}
    )
    prompt = {"prompt_token_ids": draws["prompt"]}
    outputs = llm.generate([prompt] * draws["count"], sampling, use_tqdm=False)
    runs = Counter(tuple(o.outputs[0].token_ids[1:]) for o in outputs)
    return {" ".join(map(str, run)): count for run, count in runs.items()}


def _completion(completion: Any) -> dict[str, Any]:
    return {
        "tokens": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "logprobs": _logprobs(completion.logprobs),
    }


def _logprobs(positions: Any) -> list[dict[str, float]] | None:
    """Log probability by token id, position by position."""
    if positions is None:
        return None
    return [
        {str(token): entry.logprob for token, entry in (position or {}).items()}
        for position in positions
    ]


def run(job: dict[str, Any], result_path: Path) -> dict[str, Any]:
    settings = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "async_scheduling": False,
        "enable_prefix_caching": False,
    } | job.get("engine", {})
    llm = LLM(
        model=job["target"],
        speculative_config=job.get("speculative_config"),
        **settings,
    )
    recorder = None
    if job.get("record"):
        recorder = Recorder(model_runner(llm))
        if job.get("record_hidden"):
            recorder.watch_layers()
    sampling = SamplingParams(
        temperature=job.get("temperature", 0.0),
        max_tokens=job.get("max_tokens"),
        ignore_eos=True,
        detokenize=False,
    )
    cases = {name: run_case(llm, case) for name, case in job.get("cases", {}).items()}
    batches, seconds = [], []
    for prompts in job.get("batches", []):
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        started = time.perf_counter()
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
        batches.append([list(o.outputs[0].token_ids) for o in outputs])
    result: dict[str, Any] = {
        "batches": batches,
        "seconds": seconds,
        "cases": cases,
        "draws": {name: run_draws(llm, d) for name, d in job.get("draws", {}).items()},
        "counters": counters(llm),
    }
    if job.get("speculative_config") and job.get("in_process", True):
        runner = model_runner(llm)
        proposer = getattr(runner, "drafter", getattr(runner, "speculator", None))
        result["proposer"] = f"{type(proposer).__module__}.{type(proposer).__name__}"
    if recorder is not None:
        result["blocks"] = recorder.blocks
        if recorder.hidden:
            save_file(recorder.hidden, result_path.with_suffix(".safetensors"))
    return result


def main() -> None:
    job_path, result_path = map(Path, sys.argv[1:])
    result = run(json.loads(job_path.read_text()), result_path)
    result_path.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
