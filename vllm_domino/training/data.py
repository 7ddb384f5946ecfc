# SPDX-License-Identifier: Apache-2.0
"""Answered prompts, and how they are packed.

One JSON object a line: ``{"index": n, "prompt_ids": [...], "answer_ids": [...]}``, with
the answers the target's own. A pack is a row of documents end to end, none of which
sees another.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from vllm_domino.training.recipe import RecipeError

PADDING = -1  # document number where a pack has no token


@dataclass(frozen=True)
class Document:
    tokens: list[int]
    answer_start: int


@dataclass
class Packs:
    """A batch of packs, each (N, T)."""

    tokens: torch.Tensor
    documents: torch.Tensor  # which document a token is of; PADDING where none
    positions: torch.Tensor  # within its document
    is_answer: torch.Tensor

    def to(self, device: torch.device) -> "Packs":
        return Packs(*(getattr(self, name).to(device) for name in self.__annotations__))


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """JSON objects of a JSONL file with their line numbers; empty lines are skipped.

    Raises:
        RecipeError: The file is not there, is empty, or a line is not an object.
    """
    if not path.is_file():
        raise RecipeError(f"{path}: no such file.")
    empty = True
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise RecipeError(f"{path}:{number}: not JSON ({error}).") from None
            if not isinstance(value, dict):
                raise RecipeError(f"{path}:{number}: expected a JSON object.")
            empty = False
            yield number, value
    if empty:
        raise RecipeError(
            f"{path}: the file is empty; expected one JSON object a line."
        )


def read_documents(path: Path, vocab_size: int, max_positions: int) -> list[Document]:
    """Reads what `vllm-domino train data` wrote.

    Raises:
        RecipeError: A line is broken or does not fit the target; names the line.
    """
    documents = []
    for number, value in read_lines(path):
        where = f"{path}:{number}"
        prompt: Any = value.get("prompt_ids")
        answer: Any = value.get("answer_ids")
        for name, ids in (("prompt_ids", prompt), ("answer_ids", answer)):
            if not isinstance(ids, list) or not all(
                isinstance(i, int) and 0 <= i < vocab_size for i in ids
            ):
                raise RecipeError(
                    f"{where}: {name} must be a list of token ids from 0 to "
                    f"{vocab_size - 1}. Make the file with `vllm-domino train data`."
                )
        tokens = [*prompt, *answer]
        if len(tokens) > max_positions:
            raise RecipeError(
                f"{where}: {len(tokens)} tokens, but the target has {max_positions} "
                "positions. Leave the line out or shorten it."
            )
        documents.append(Document(tokens, len(prompt)))
    return documents


class PackedData:
    """Documents in an order and in packs that only the seed decides.

    Micro-batch ``i`` of a run is the same whoever asks for it, and whenever: that is
    what makes a resumed run, and one on more processes, exact.
    """

    def __init__(
        self, documents: list[Document], length: int, batch_size: int, seed: int
    ) -> None:
        self.documents = [
            d for d in documents if min(len(d.tokens), length) - d.answer_start >= 2
        ]
        if not self.documents:
            raise RecipeError(
                f"no document has two answer tokens among its first {length}, so there "
                "is nothing to draft. Generate longer answers, or raise "
                "sequence_length."
            )
        self.length = length
        self.batch_size = batch_size
        self.seed = seed

    @property
    def num_truncated(self) -> int:
        return sum(len(d.tokens) > self.length for d in self.documents)

    def microbatch(self, index: int) -> Packs:
        """The ``index``-th micro-batch, counted over epochs."""
        epoch = 0
        while index >= (count := self._num_batches(epoch)):
            index -= count
            epoch += 1
        packs = self._epoch(epoch)
        chosen = packs[index * self.batch_size : (index + 1) * self.batch_size]
        return self._stack([[self.documents[i] for i in pack] for pack in chosen])

    def _num_batches(self, epoch: int) -> int:
        # The last packs of an epoch that fill no batch are left for another shuffle.
        return max(1, len(self._epoch(epoch)) // self.batch_size)

    @lru_cache(maxsize=64)  # noqa: B019 - lives as long as the run
    def _epoch(self, epoch: int) -> list[list[int]]:
        """Document numbers of each pack, filled in shuffled order."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.documents), generator=generator).tolist()
        packs: list[list[int]] = []
        room = 0
        for i in order:
            size = min(len(self.documents[i].tokens), self.length)
            if not packs or size > room:
                packs.append([])
                room = self.length
            packs[-1].append(i)
            room -= size
        while len(packs) < self.batch_size:
            packs += packs[: self.batch_size - len(packs)]
        return packs

    def _stack(self, packs: list[list[Document]]) -> Packs:
        shape = (len(packs), self.length)
        batch = Packs(
            tokens=torch.zeros(shape, dtype=torch.long),
            documents=torch.full(shape, PADDING),
            positions=torch.zeros(shape, dtype=torch.long),
            is_answer=torch.zeros(shape, dtype=torch.bool),
        )
        for row, pack in enumerate(packs):
            start = 0
            for number, document in enumerate(pack):
                tokens = document.tokens[: self.length]
                end = start + len(tokens)
                batch.tokens[row, start:end] = torch.tensor(tokens)
                batch.documents[row, start:end] = number
                batch.positions[row, start:end] = torch.arange(len(tokens))
                batch.is_answer[row, start + document.answer_start : end] = True
                start = end
        return batch
