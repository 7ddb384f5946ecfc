# SPDX-License-Identifier: Apache-2.0
"""Gets a draft's config.json, from a folder or a hub, and takes JSON at its word.

Python's parser takes the last of two equal keys and accepts NaN; a config that needs
either has been damaged or edited by mistake, so both are refused.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_domino.errors import DraftConfigError

CONFIG_NAME = "config.json"
# Configs are a few kilobytes; this is no config.
_MAX_BYTES = 16 * 2**20


def looks_local(model: str) -> bool:
    """Whether this can only be a path: hub ids are ``name`` or ``owner/name``."""
    return model.startswith(("/", "./", "../", "~")) or model.count("/") > 1


def require_model(model: str) -> None:
    """
    Raises:
        DraftConfigError: It can be neither a folder nor a hub id.
    """
    folder = Path(model)
    if not model or folder.is_file() or (looks_local(model) and not folder.is_dir()):
        found = (
            "is a file, not a folder" if folder.is_file() else "there is no such folder"
        )
        raise DraftConfigError(
            f"{model!r}: {found}. Give a model's folder, or its hub id (owner/name)."
        )


def read_config(model: str, revision: str | None = None) -> dict[str, Any]:
    """The parsed config.json of a folder or a hub id.

    Raises:
        DraftConfigError: It is not there, or not JSON, or not an object.
    """
    folder = Path(model)
    require_model(model)
    path = folder / CONFIG_NAME if folder.is_dir() else _fetch(model, revision)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it is {path.stat().st_size:,} bytes long")
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DraftConfigError(
            f"{model}: config.json cannot be read ({_said(error)}). Fetch or export "
            "the draft again, or mend the file."
        ) from None


def parse(text: str) -> dict[str, Any]:
    """A JSON object, strictly.

    Raises:
        ValueError: It is not one; says why.
    """
    if not text.strip():
        raise ValueError("it is empty")
    value = json.loads(
        text,
        object_pairs_hook=_without_repeats,
        parse_constant=_refuse_constant,
        parse_float=_finite,
    )
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not an object")
    return value


def _fetch(model: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, CONFIG_NAME, revision=revision))
    except Exception as error:  # the hub's client raises many kinds
        raise DraftConfigError(
            f"{model}: config.json cannot be read ({_said(error)}). Check the path or "
            "hub id and its revision; that a hub can be reached (HF_HUB_OFFLINE, "
            "HF_ENDPOINT) if it is not a folder; and, for a gated draft, that HF_TOKEN "
            "is one with access."
        ) from None


def _without_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} is there twice")
        found[key] = value
    return found


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is too large a number")
    return value


def _said(error: BaseException) -> str:
    """An exception's first line; its kind where it has none."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
