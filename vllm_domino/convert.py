# SPDX-License-Identifier: Apache-2.0
"""``vllm-domino convert``: a draft in another maker's layout, its values untouched."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from vllm_domino.draft import Draft
from vllm_domino.errors import DraftConfigError
from vllm_domino.makers import MAKERS
from vllm_domino.makers.layout import Maker
from vllm_domino.makers.speculators import SPECULATORS

WRITTEN = {maker.name: maker for maker in MAKERS if maker.write is not None}


def convert(
    draft: Draft, destination: Path, to: str, target: str = "", force: bool = False
) -> None:
    """Writes a draft anew, whole or not at all.

    Args:
        destination: Folder to make; nothing is overwritten without ``force``.
        to: Name of a maker in ``WRITTEN``.
        target: The target's name, which speculators' layout holds.

    Raises:
        DominoError: The draft is not sound, or the destination is there.
    """
    maker = WRITTEN.get(to)
    if maker is None:
        raise DraftConfigError(
            f"--to is {to!r}; layouts that are written: {', '.join(WRITTEN)}."
        )
    if destination.exists() and not force:
        raise DraftConfigError(
            f"{destination} is there already. Name another folder, or pass --force to "
            "replace it."
        )
    if destination.exists() and destination.resolve() == draft.folder.resolve():
        raise DraftConfigError(
            f"{destination} is the draft itself. Name another folder to convert into."
        )
    target = target or draft.verifier or ""
    if maker is SPECULATORS and not target:
        raise DraftConfigError(
            "speculators' layout names the target inside, and this draft does not say "
            "which it is. Pass --target with its hub id or folder."
        )
    if draft.files.has_mask_embedding:
        raise DraftConfigError(
            f"{draft.source}: it ships a mask embedding in a file of its own, which no "
            "other layout has. Serve it as it is."
        )
    draft.check()
    destination.parent.mkdir(parents=True, exist_ok=True)
    # Beside it, so that the last step is one rename on the same disk.
    scratch = Path(tempfile.mkdtemp(prefix=".convert-", dir=destination.parent))
    try:
        _write(draft, maker, target, scratch)
        # As any new file, not as a temporary one.
        scratch.chmod(0o777 & ~_umask())
        for path in scratch.iterdir():
            path.chmod(0o666 & ~_umask())
        if destination.exists():
            old = scratch.with_name(f"{scratch.name}-old")
            destination.rename(old)
            scratch.rename(destination)
            shutil.rmtree(old)
        else:
            scratch.rename(destination)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _write(draft: Draft, maker: Maker, target: str, folder: Path) -> None:
    tensors = {maker.theirs(n): t.contiguous() for n, t in draft.tensors()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert maker.write is not None
    config: dict[str, Any] = maker.write(
        draft.config, draft.maker.backbone(draft.raw), target
    )
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "config.json").write_text(f"{text}\n", encoding="utf-8")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
