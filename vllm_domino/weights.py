# SPDX-License-Identifier: Apache-2.0
"""Reads a draft's tensors from a folder: one safetensors file, shards with an index,
or, only where the user allows it, pickled files."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vllm_domino.errors import CheckpointError

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_PICKLES = "*.bin"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}
MASK_EMBEDDING = "mask_embedding.pt"  # vLLM reads it beside the weights


@dataclass(frozen=True)
class TensorInfo:
    """What a file's header says of a tensor."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors names it: BF16, F32, I64, ...

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class WeightFiles:
    """The files that hold a draft's tensors.

    Attributes:
        folder: The draft's folder.
        paths: Them, in order.
        pickled: Whether they are pickled, and then read as plain tensors only.
    """

    folder: Path
    paths: tuple[Path, ...]
    pickled: bool = False

    @classmethod
    def of(cls, folder: Path, allow_pickle: bool = False) -> "WeightFiles":
        """
        Raises:
            CheckpointError: Weights are missing, or pickled and not allowed.
        """
        if (folder / MASK_EMBEDDING).exists() and not allow_pickle:
            raise CheckpointError(
                f"{folder}: {MASK_EMBEDDING} is a pickled file, which can run code. "
                'If you trust who made it, set "allow_pickle": true in the speculative '
                "config; it is then read as a plain tensor."
            )
        if (folder / _INDEX_FILE).is_file():
            return cls(folder, tuple(_indexed(folder)))
        if (folder / _SINGLE_FILE).is_file():
            return cls(folder, (folder / _SINGLE_FILE,))
        pickles = tuple(sorted(folder.glob(_PICKLES)))
        if not pickles:
            raise CheckpointError(
                f"{folder}: neither {_SINGLE_FILE} nor {_INDEX_FILE} is there. Fetch "
                "or export the draft again, as safetensors."
            )
        if not allow_pickle:
            raise CheckpointError(
                f"{folder}: neither {_SINGLE_FILE} nor {_INDEX_FILE} is there, only "
                f"pickled files ({pickles[0].name}), which can run code. Export the "
                "draft as safetensors; or, if you trust who made it, set "
                '"allow_pickle": true in the speculative config, and they are read as '
                "plain tensors."
            )
        return cls(folder, pickles, pickled=True)

    @property
    def has_mask_embedding(self) -> bool:
        return (self.folder / MASK_EMBEDDING).exists()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor with its name, one at a time.

        Raises:
            CheckpointError: A file is not whole, or two hold the same name.
        """
        seen: dict[str, Path] = {}
        for path in self.paths:
            for name, tensor in _unpickled(path) if self.pickled else _safe(path):
                self._note(seen, name, path)
                yield name, tensor

    def headers(self) -> dict[str, TensorInfo]:
        """Every tensor's shape and dtype, without its values where they can stay."""
        if self.pickled:
            return {
                name: TensorInfo(tuple(t.shape), _DTYPES.get(t.dtype, str(t.dtype)))
                for name, t in self.tensors()
            }
        seen: dict[str, Path] = {}
        found = {}
        for path in self.paths:
            for name, info in _headers(path).items():
                self._note(seen, name, path)
                found[name] = info
        return found

    def _note(self, seen: dict[str, Path], name: str, path: Path) -> None:
        if name in seen:
            raise CheckpointError(
                f"{self.folder}: tensor {name!r} is in {seen[name].name} and in "
                f"{path.name} too. Fetch or export the draft again."
            )
        seen[name] = path


def _indexed(folder: Path) -> Iterator[Path]:
    index = folder / _INDEX_FILE
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        paths = [folder / name for name in names]
    except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        raise CheckpointError(
            f"{index}: not a safetensors index ({error}). Fetch or export the draft "
            "again."
        ) from None
    for name, path in zip(names, paths, strict=True):
        if Path(name).name != name:
            raise CheckpointError(
                f"{index} names {name!r}, which is not beside it. Fetch or export the "
                "draft again."
            )
        if not path.is_file():
            raise CheckpointError(
                f"{index} names {name!r}, which is not there. The download is "
                "incomplete: fetch the draft again."
            )
    yield from paths


def _safe(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with _opened(path) as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file.get_tensor(name)


def _headers(path: Path) -> dict[str, TensorInfo]:
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            name: TensorInfo(tuple(held.get_shape()), held.get_dtype())
            for name, held in slices.items()
        }


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a whole safetensors file ({error}). The download or the "
            "export was cut short: fetch or export the draft again."
        ) from None


def _unpickled(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        yield from ((str(name), tensor.detach()) for name, tensor in loaded.items())
    except Exception as error:  # a damaged pickle raises nearly anything
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{path}: not a file of plain tensors ({first}). Export the draft as "
            "safetensors."
        ) from None
