# SPDX-License-Identifier: Apache-2.0
"""Environments beside this one: without vllm-domino, with its wheel, or with a vLLM
that is not quite the one we know. All else is this environment's own, by link."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from tests.engines import ROOT

_PACKAGED = ("vllm_domino", "proposers", "pyproject.toml", "README.md", "LICENSE")


def make_environment(folder: Path, wheel: Path | None = None) -> Path:
    """A virtual environment with all that is here but vllm-domino; its Python."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", folder],
        check=True,
        capture_output=True,
    )
    python = folder / "bin" / "python"
    packages = site_packages(folder)
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "vllm_domino" not in entry.name and entry.name != "__pycache__":
            (packages / entry.name).symlink_to(entry)
    script = Path(sys.executable).parent / "vllm"
    body = script.read_text().split("\n", 1)[1]
    (folder / "bin" / "vllm").write_text(f"#!{python}\n{body}")
    (folder / "bin" / "vllm").chmod(0o755)
    if wheel is not None:
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
        subprocess.run([*pip, "--no-deps", "--no-index", wheel], check=True)
    return python


def site_packages(folder: Path) -> Path:
    return next((folder / "lib").glob("python*")) / "site-packages"


def build_wheel(folder: Path) -> Path:
    """The distribution as a user would install it, built from a copy of the sources."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name in _PACKAGED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps"]
    subprocess.run(
        [*pip, "--no-build-isolation", "-w", folder, source],
        check=True,
        capture_output=True,
    )
    return next(folder.glob("*.whl"))


def change_vllm(environment: Path, module: str, edit: Callable[[str], str]) -> None:
    """Gives an environment its own vLLM with one module's source changed."""
    linked = site_packages(environment) / "vllm"
    original = linked.resolve()
    linked.unlink()
    for folder, _, files in os.walk(original):
        copy = linked / Path(folder).relative_to(original)
        copy.mkdir()
        for file in files:
            (copy / file).symlink_to(Path(folder) / file)
    source = linked.joinpath(*module.split(".")[1:]).with_suffix(".py")
    text = source.read_text()
    source.unlink()
    source.write_text(edit(text))
    assert source.read_text() != text
