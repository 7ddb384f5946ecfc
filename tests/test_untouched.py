# SPDX-License-Identifier: Apache-2.0
"""Who does not ask for Domino gets the same with us installed as without."""

from pathlib import Path
from typing import Any

import pytest

from tests.drafts import plain_dflash_draft
from tests.engines import BYTES4, run_engine
from tests.environments import make_environment

pytestmark = pytest.mark.engine

# (prompts, tokens) a run: the interpreter that V2 runs in here is slow.
SIZES = {"v1": (16, 32), "v2": (4, 16)}
PROPOSERS = {
    "v1": "vllm.v1.spec_decode.dflash.DFlashProposer",
    "v2": "vllm.v1.worker.gpu.spec_decode.dflash.speculator.DFlashSpeculator",
}


@pytest.fixture(scope="module")
def without_us(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_environment(tmp_path_factory.mktemp("without") / "venv"))


@pytest.fixture(scope="module")
def speculative_configs(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, dict[str, Any] | None]:
    folder: Path = tmp_path_factory.mktemp("dflash") / "draft"
    dflash = plain_dflash_draft(BYTES4.draft, folder)
    return {
        "dflash": {
            "method": "dflash",
            "model": str(dflash),
            "num_speculative_tokens": 7,
        },
        "ngram": {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 3,
        },
        "none": None,
    }


@pytest.mark.parametrize(
    ("method", "runner"),
    [
        ("dflash", "v1"),
        ("dflash", "v2"),
        ("ngram", "v1"),
        ("none", "v1"),
        pytest.param("ngram", "v2", marks=pytest.mark.slow),
        pytest.param("none", "v2", marks=pytest.mark.slow),
    ],
)
def test_other_methods_are_the_same_with_and_without_us(
    method: str,
    runner: str,
    speculative_configs: dict[str, dict[str, Any] | None],
    without_us: str,
) -> None:
    num_prompts, max_tokens = SIZES[runner]
    job = {
        "target": str(BYTES4.target),
        "speculative_config": speculative_configs[method],
        "batches": [BYTES4.prompts[:num_prompts]],
        "max_tokens": max_tokens,
    }
    with_us = dict(run_engine(job, runner))
    without = dict(run_engine(job, runner, python=without_us))
    assert with_us.pop("seconds")
    assert without.pop("seconds")
    # Outputs, vLLM's counters and the proposer's class.
    assert with_us == without
    golden = [output[:max_tokens] for output in BYTES4.golden["outputs"]]
    assert with_us["batches"] == [golden[:num_prompts]]
    if method == "dflash":
        assert with_us["proposer"] == PROPOSERS[runner]
        assert with_us["counters"]["num_drafts"] > 0
