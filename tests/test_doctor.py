# SPDX-License-Identifier: Apache-2.0
"""``vllm-domino doctor``: what it sees, and what it says to do."""

import pytest
import torch

from tests.commands import command
from vllm_domino import doctor, mend, seams
from vllm_domino.doctor import Finding


def findings() -> dict[str, Finding]:
    return {finding.subject: finding for finding in doctor.examine()}


def test_doctor_finds_this_machine_fit() -> None:
    found = findings()
    assert not [finding for finding in found.values() if finding.verdict == "bad"]
    assert "vllm-domino" in found["versions"].found
    if not torch.cuda.is_available():
        assert "temperatures" in found["CPU faults"].found


def test_doctor_sees_a_plugin_that_is_shut_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    finding = findings()["plugin"]
    assert finding.verdict == "bad"
    assert "Add domino to VLLM_PLUGINS" in finding.remedy
    assert command("doctor")[0] == 1


def test_doctor_sees_a_vllm_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "differences", lambda: ["vllm.x is gone (why)"])
    finding = findings()["vLLM's seams"]
    assert finding.verdict == "bad"
    assert "vllm.x is gone" in finding.found
    assert seams.SUPPORTED in finding.remedy


def test_doctor_sees_builds_that_do_not_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mend, "is_installed", lambda name: True)
    finding = findings()["CUDA builds beside a CPU torch"]
    assert finding.verdict == "bad"
    assert "torchvision" in finding.found
    assert finding.remedy == "vllm-domino mend"


def test_a_check_that_breaks_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[str]:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(seams, "differences", broken)
    found = findings()
    assert "RuntimeError: no such luck" in found["vLLM's seams"].found
    assert found["plugin"].verdict == "ok"
