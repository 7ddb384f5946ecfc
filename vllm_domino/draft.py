# SPDX-License-Identifier: Apache-2.0
"""``Draft``: a checkpoint on disk or on a hub, opened and understood."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_domino.backbone import require_backbone
from vllm_domino.checkpoint import check_folder
from vllm_domino.config import DraftConfig
from vllm_domino.config_file import read_config
from vllm_domino.errors import CheckpointError
from vllm_domino.makers import read
from vllm_domino.makers.layout import Maker, look_up
from vllm_domino.makers.speculators import VERIFIER
from vllm_domino.weights import TensorInfo, WeightFiles


@dataclass(frozen=True)
class Draft:
    """
    Attributes:
        source: The path or hub id it was asked for by.
        folder: Where its files lie.
        raw: Its config.json.
        config: What that says, whoever wrote it.
        maker: Whose layout it has.
        files: Its weights.
    """

    source: str
    folder: Path
    raw: dict[str, Any]
    config: DraftConfig
    maker: Maker
    files: WeightFiles

    @classmethod
    def open(
        cls, source: str, revision: str | None = None, allow_pickle: bool = False
    ) -> "Draft":
        """Reads its config.json and finds its weights.

        Raises:
            DominoError: It is not a Domino draft, or its files are not there.
        """
        raw = read_config(source, revision)
        config, maker = read(raw, source)
        require_backbone(raw, maker, source)
        folder = Path(source)
        if not folder.is_dir():
            folder = _download(source, revision)
        return cls(
            source, folder, raw, config, maker, WeightFiles.of(folder, allow_pickle)
        )

    @property
    def verifier(self) -> str | None:
        """The target that it names; only speculators' layout does."""
        named = look_up(self.raw, VERIFIER)
        return named if isinstance(named, str) and named else None

    def check(self) -> None:
        """Reads every tensor, and raises ``CheckpointError`` unless all is sound."""
        check_folder(self.config, self.maker, self.folder, self.files.pickled)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Our name and the values of each tensor."""
        for name, tensor in self.files.tensors():
            yield self.maker.ours(name), tensor

    def headers(self) -> dict[str, TensorInfo]:
        """Shape and dtype of each tensor by our name, its values left on disk."""
        return {
            self.maker.ours(name): info for name, info in self.files.headers().items()
        }


def _download(source: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    wanted = ["config.json", "*.safetensors", "*.safetensors.index.json"]
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=wanted))
    except Exception as error:  # the hub's client raises many kinds
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{source}: its weights cannot be fetched ({first}). Check that a hub can "
            "be reached, and that HF_TOKEN has access if the draft is gated."
        ) from None
