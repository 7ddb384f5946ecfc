# SPDX-License-Identifier: Apache-2.0
"""The training loop, on Hugging Face Accelerate: one process or many, resumable.

Weights, optimiser and step are in a checkpoint; data order and anchors follow from the
seed and the step. So a run that was killed and resumed ends with the same weights, bit
for bit, as one that was not.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from vllm_domino.training.blocks import DraftObjective, Losses, sample_anchors
from vllm_domino.training.curriculum import (
    base_weight,
    learning_rate_factor,
    position_weights,
)
from vllm_domino.training.data import PackedData, read_documents
from vllm_domino.training.recipe import Recipe, RecipeError
from vllm_domino.training.target import Target, make_draft

METRICS_FILE = "metrics.jsonl"
_PROGRESS_FILE = "progress.json"
_CHECKPOINT = "step-"


class Trainer:
    def __init__(self, recipe: Recipe, console: Console) -> None:
        self.recipe = recipe
        self.console = console
        self.accelerator = Accelerator(
            mixed_precision="bf16" if recipe.dtype == "bfloat16" else "no",
            gradient_accumulation_steps=recipe.accumulation,
            log_with="tensorboard",
            project_dir=str(recipe.output),
        )
        self.target = Target(recipe, self.accelerator.device)
        draft = make_draft(recipe, self.target)
        self.max_drafts = draft.max_drafts
        objective = DraftObjective(
            draft, position_weights(recipe, draft.max_drafts), recipe.loss_rows
        )
        optimizer = AdamW(
            objective.parameters(),
            lr=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
        )
        self.schedule = LambdaLR(
            optimizer, lambda step: learning_rate_factor(recipe, step)
        )
        self.objective, self.optimizer = self.accelerator.prepare(objective, optimizer)
        self.accelerator.register_for_checkpointing(self.schedule)
        documents = read_documents(
            recipe.data,
            self.target.config.vocab_size,
            self.target.config.max_position_embeddings,
        )
        self.data = PackedData(
            documents, recipe.sequence_length, recipe.batch_size, recipe.seed
        )
        self.step = 0

    def run(self, resume: bool = False) -> Path:
        """Trains to the end and saves the draft; its folder.

        Raises:
            RecipeError: The output folder holds a run and ``resume`` is not set.
        """
        recipe = self.recipe
        if self.accelerator.is_main_process:
            recipe.output.mkdir(parents=True, exist_ok=True)
        self._start(resume)
        self.accelerator.init_trackers("tensorboard")
        self._announce()
        with self._progress() as (progress, task):
            while self.step < recipe.steps:
                started = time.perf_counter()
                losses = self._optimise()
                self.step += 1
                self._report(losses, time.perf_counter() - started, progress, task)
                if self.step % recipe.save_every == 0 and self.step < recipe.steps:
                    self._save_checkpoint()
        draft = self._save_draft()
        self.accelerator.end_training()
        if self.accelerator.is_main_process:
            from vllm_domino.training.plot import plot_run

            plot_run(recipe.output / METRICS_FILE, recipe.output / "run.png")
        return draft

    def _announce(self) -> None:
        """What is about to happen, in a few lines."""
        accelerator, data, recipe = self.accelerator, self.data, self.recipe
        accelerator.print(
            f"{len(data.documents)} documents, {data.num_truncated} of them cut at "
            f"{recipe.sequence_length} tokens; {recipe.steps} steps of "
            f"{recipe.batch_size * recipe.accumulation * accelerator.num_processes} "
            f"packs; processes: {accelerator.num_processes}"
        )

    def _optimise(self) -> Losses:
        """One optimiser step over ``accumulation`` micro-batches a process."""
        recipe, accelerator = self.recipe, self.accelerator
        share = recipe.accumulation * accelerator.num_processes
        lam = base_weight(recipe, self.step)
        seen: list[Losses] = []
        for turn in range(recipe.accumulation):
            index = self.step * share
            index += turn * accelerator.num_processes + accelerator.process_index
            generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + index)
            packs = self.data.microbatch(index)
            anchors = sample_anchors(packs, recipe.anchors, generator)
            packs, anchors = (
                packs.to(accelerator.device),
                anchors.to(accelerator.device),
            )
            draft = accelerator.unwrap_model(self.objective).draft
            with accelerator.accumulate(self.objective):
                losses = self.objective(
                    self.target.features(draft, packs),
                    packs,
                    anchors,
                    self.target.embed,
                    self.target.lm_head,
                    lam,
                )
                accelerator.backward(losses.total)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(
                        self.objective.parameters(), recipe.max_grad_norm
                    )
                self.optimizer.step()
                self.optimizer.zero_grad()
            seen.append(losses)
        self.schedule.step()
        return Losses(
            *(
                torch.stack([getattr(losses, name).detach().float() for losses in seen])
                .mean()
                .reshape(1)
                for name in Losses.__annotations__
            )
        )

    def _start(self, resume: bool) -> None:
        checkpoints = self._checkpoints()
        used = checkpoints or (self.recipe.output / "draft").exists()
        if used and not resume:
            raise RecipeError(
                f"output: {self.recipe.output} holds a run already. Give --resume to "
                "go on with it, or name another folder."
            )
        if not checkpoints:
            return
        latest = checkpoints[-1]
        self.accelerator.load_state(str(latest))
        self.step = json.loads((latest / _PROGRESS_FILE).read_text())["step"]
        self._forget_metrics_after(self.step)
        self.accelerator.print(f"resumed at step {self.step} from {latest}")

    def _checkpoints(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        found = self.recipe.output.glob(f"checkpoints/{_CHECKPOINT}*")
        return sorted(
            (p for p in found if (p / _PROGRESS_FILE).is_file()),
            key=lambda p: int(p.name.removeprefix(_CHECKPOINT)),
        )

    def _save_checkpoint(self) -> None:
        final = self.recipe.output / "checkpoints" / f"{_CHECKPOINT}{self.step}"
        with self._atomically(final) as folder:
            self.accelerator.save_state(str(folder))
            if self.accelerator.is_main_process:
                (folder / _PROGRESS_FILE).write_text(json.dumps({"step": self.step}))
        if self.accelerator.is_main_process:
            for old in self._checkpoints()[:-2]:
                shutil.rmtree(old)

    def _save_draft(self) -> Path:
        final = self.recipe.output / "draft"
        state = self.accelerator.get_state_dict(self.objective)
        with self._atomically(final) as folder:
            if self.accelerator.is_main_process:
                draft = self.accelerator.unwrap_model(self.objective).draft
                dtype = getattr(torch, self.recipe.dtype)
                draft.config.dtype = self.recipe.dtype
                draft.save_pretrained(
                    folder,
                    state_dict={
                        name.removeprefix("draft."): tensor.to(dtype)
                        for name, tensor in state.items()
                    },
                )
        return final

    @contextmanager
    def _atomically(self, final: Path) -> Iterator[Path]:
        """A folder that takes its name only when all of it is written; what is left of
        one that was not, a full disk's say, is removed."""
        partial = final.with_name(final.name + ".partial")
        main = self.accelerator.is_main_process
        if main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        try:
            yield partial
        except BaseException:
            if main:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        self.accelerator.wait_for_everyone()
        if main:
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
        self.accelerator.wait_for_everyone()

    @contextmanager
    def _progress(self) -> Iterator[tuple[Progress, Any]]:
        progress = Progress(
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.accelerator.is_main_process,
        )
        with progress:
            yield (
                progress,
                progress.add_task("", total=self.recipe.steps, completed=self.step),
            )

    def _report(
        self, losses: Losses, seconds: float, progress: Progress, task: Any
    ) -> None:
        recipe, accelerator = self.recipe, self.accelerator
        values = {
            name: float(accelerator.gather(getattr(losses, name)).mean())
            for name in Losses.__annotations__
        }
        tokens = recipe.sequence_length * recipe.batch_size * recipe.accumulation
        rate = tokens * accelerator.num_processes / seconds
        progress.update(
            task,
            completed=self.step,
            description=f"loss {values['total']:.3f}  acceptance base "
            f"{values['base_acceptance']:.2f} final {values['final_acceptance']:.2f}  "
            f"{rate:,.0f} tokens/s",
        )
        if self.step % recipe.log_every and self.step != recipe.steps:
            return
        values["base_weight"] = base_weight(recipe, self.step - 1)
        values["learning_rate"] = self.schedule.get_last_lr()[0]
        accelerator.log(values, step=self.step)
        if accelerator.is_main_process:
            with (recipe.output / METRICS_FILE).open("a") as file:
                file.write(json.dumps({"step": self.step, **values}) + "\n")

    def _forget_metrics_after(self, step: int) -> None:
        path = self.recipe.output / METRICS_FILE
        if self.accelerator.is_main_process and path.is_file():
            kept = [
                line
                for line in path.read_text().splitlines(keepends=True)
                if line.endswith("\n") and json.loads(line)["step"] <= step
            ]
            path.write_text("".join(kept))


def train(recipe: Recipe, console: Console, resume: bool = False) -> Path:
    """Runs a recipe; the folder of the trained draft."""
    return Trainer(recipe, console).run(resume)
