# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own: reads a job, writes what it saw.

    python -m tests.engine_process JOB.json RESULT.json

The engine core runs in this same process, so that what the proposer drafts can be
recorded where it comes out, in both model runners.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from safetensors.torch import save_file
from vllm import LLM, SamplingParams

from tests.capture import no_host_sync


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


def model_runner(llm: LLM) -> Any:
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner


def counters(llm: LLM) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode"):
            value = getattr(metric, "values", getattr(metric, "value", None))
            seen[metric.name.removeprefix("vllm:spec_decode_")] = value
    return seen


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
        max_tokens=job["max_tokens"],
        ignore_eos=True,
        detokenize=False,
    )
    batches = []
    for prompts in job["batches"]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        batches.append([list(o.outputs[0].token_ids) for o in outputs])
    result: dict[str, Any] = {"batches": batches, "counters": counters(llm)}
    if job.get("speculative_config"):
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
