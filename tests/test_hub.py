# SPDX-License-Identifier: Apache-2.0
"""Drafts by hub id and revision, from a hub's cache as a download leaves it."""

import shutil
from pathlib import Path

import pytest

from tests.configured import configure, domino
from tests.engines import BYTES4
from tests.makers import common
from vllm_domino.draft import Draft
from vllm_domino.errors import DraftConfigError

HUB_ID = "someone/some-draft"
COMMITS = {"main": "a" * 40, "v2": "b" * 40}
# Which checkpoint each revision holds.
HELD = {"main": BYTES4.draft, "v2": common.DATA / "modelopt"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    repository = tmp_path / f"models--{HUB_ID.replace('/', '--')}"
    for revision, commit in COMMITS.items():
        shutil.copytree(HELD[revision], repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.mark.parametrize(
    ("revision", "block_size"),
    [(None, 8), ("main", 8), ("v2", 6), (COMMITS["v2"], 6)],
)
def test_a_hub_id_is_read_at_its_revision(
    hub: Path, revision: str | None, block_size: int
) -> None:
    draft = Draft.open(HUB_ID, revision)
    assert draft.config.block_size == block_size
    draft.check()


@pytest.mark.parametrize(("revision", "drafts"), [(None, 8), ("v2", 6)])
def test_vllm_gets_that_revision(hub: Path, revision: str | None, drafts: int) -> None:
    chosen = {} if revision is None else {"revision": revision}
    config = configure(BYTES4.target, domino(HUB_ID, **chosen))
    assert config.num_speculative_tokens == drafts
    assert COMMITS[revision or "main"] in repr(config.draft_model_config.revision)
    assert config.draft_model_config.architectures == ["DFlashDominoDraftModel"]


def test_a_revision_that_is_not_there(hub: Path) -> None:
    with pytest.raises(DraftConfigError, match="Check the path or hub id and its"):
        Draft.open(HUB_ID, "v3")
