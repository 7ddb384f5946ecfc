# SPDX-License-Identifier: Apache-2.0
"""The plugin is cheap, idempotent and never breaks its host; the table of seams holds
in this vLLM, and where it does not, Domino alone is off, with one clear error."""

import logging
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from tests.engines import BYTES4, domino_job, run_engine, start_engine
from tests.environments import build_wheel, change_vllm, make_environment
from vllm_domino import seams
from vllm_domino.errors import IncompatibleVllmError


def run_python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True
    )


def test_vllm_finds_the_plugin() -> None:
    found = {e.name: e.value for e in entry_points(group="vllm.general_plugins")}
    assert found["domino"] == "vllm_domino.plugin:register"


def test_registration_imports_neither_torch_nor_vllm() -> None:
    code = "from vllm_domino.plugin import register; register(); register()"
    report = run_python(code, "-X", "importtime").stderr
    imported = {line.rsplit("|", 1)[-1].strip() for line in report.splitlines()}
    assert "vllm_domino.seams" in imported
    heavy = {"torch", "vllm", "transformers", "pydantic", "numpy", "triton"}
    assert not {name for name in imported if name.split(".")[0] in heavy}


def test_registering_twice_patches_once() -> None:
    code = """
import vllm.engine.arg_utils as arg_utils
original = arg_utils.EngineArgs.create_speculative_config
from vllm_domino.plugin import register
register(); register()
from vllm.plugins import load_general_plugins
load_general_plugins()
door = arg_utils.EngineArgs.create_speculative_config
assert door is not original and door.__wrapped__ is original
"""
    run_python(code)


def test_registration_never_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm_domino import plugin

    def broken() -> None:
        raise RuntimeError("seams are broken")

    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setattr(seams, "install", broken)
    with caplog.at_level(logging.ERROR, "vllm.domino"):
        plugin.register()
    assert "Domino is not available" in caplog.text


@pytest.mark.parametrize(
    "seam", [s for s in seams.SEAMS if s.patch], ids=lambda seam: seam.name
)
def test_a_module_without_the_seam_is_left_alone(
    seam: seams.Seam, caplog: pytest.LogCaptureFixture
) -> None:
    assert seam.patch is not None
    module = ModuleType(seam.module)
    before = dict(vars(module))
    with caplog.at_level(logging.WARNING, "vllm.domino"):
        seams._guarded(seam, seam.patch)(module)
    assert vars(module) == before
    assert seam.name in caplog.text
    assert "everything else is untouched" in caplog.text


def _installed() -> Path:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _copy_seams(root: Path) -> None:
    """A folder with the source files that the table names, and no others."""
    for module in {seam.module for seam in seams.SEAMS}:
        source = seams.source_file(_installed(), module)
        copy = root / source.relative_to(_installed())
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, copy)


def test_every_seam_holds(request: pytest.FixtureRequest) -> None:
    for root in (_installed(), *request.config.getoption("--vllm-source")):
        assert (root / "engine").is_dir(), f"{root} is not a vllm package"
        assert seams.differences(root) == []


@pytest.mark.parametrize("seam", seams.SEAMS, ids=lambda seam: seam.name)
def test_a_renamed_seam_is_named(seam: seams.Seam, tmp_path: Path) -> None:
    root = tmp_path / "vllm"
    _copy_seams(root)
    assert seams.differences(root) == []
    changed = seams.source_file(root, seam.module)
    last = seam.name.split(".")[-1]
    changed.write_text(changed.read_text().replace(last, f"{last}_renamed"))
    found = seams.differences(root)
    assert f"{seam.module}.{seam.name} is gone ({seam.why})" in found
    with pytest.raises(IncompatibleVllmError, match="Domino is not available"):
        seams.verify(root)


def test_other_parameters_are_named(tmp_path: Path) -> None:
    root = tmp_path / "vllm"
    _copy_seams(root)
    changed = root / "v1/spec_decode/dflash.py"
    changed.write_text(changed.read_text().replace("next_token_ids:", "next_ids:"))
    (phrase,) = seams.differences(root)
    assert "set_inputs_first_pass takes" in phrase
    assert "next_ids" in phrase


@pytest.mark.engine
def test_a_vllm_with_a_renamed_seam_refuses_domino_and_serves_all_else(
    tmp_path: Path,
) -> None:
    python = make_environment(tmp_path / "venv", build_wheel(tmp_path / "wheel"))
    change_vllm(
        tmp_path / "venv",
        "vllm.v1.worker.gpu_model_runner",
        lambda text: text.replace("DFlashProposer", "BlockProposer").replace(
            "import BlockProposer", "import DFlashProposer as BlockProposer"
        ),
    )
    job = domino_job(BYTES4.target, BYTES4.draft, [BYTES4.prompts], 16)
    process, _ = start_engine(job, "v1", str(python))
    assert process.returncode != 0
    last_line = process.stderr.strip().splitlines()[-1]
    assert "IncompatibleVllmError: vllm-domino fits vLLM 0.32 and 0.33" in last_line
    assert "vllm.v1.worker.gpu_model_runner.DFlashProposer is gone" in last_line
    plain = {
        "target": str(BYTES4.target),
        "batches": [BYTES4.prompts],
        "max_tokens": 16,
    }
    outputs = run_engine(plain, "v1", str(python))["batches"][0]
    assert outputs == [output[:16] for output in BYTES4.golden["outputs"]]
