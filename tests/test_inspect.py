# SPDX-License-Identifier: Apache-2.0
"""``vllm-domino inspect``: whose, how large, whether it fits, how to serve it."""

import json
import struct
import subprocess
from pathlib import Path

import pytest
import torch

from tests.commands import WEIGHTS, command
from tests.drafts import copy_draft
from tests.engines import BYTES4, DEMO
from tests.makers import common
from vllm_domino.checkpoint import backbone_shapes, head_shapes
from vllm_domino.makers import read


def released_8b(folder: Path) -> Path:
    """The released Qwen3-8B draft's config, and weights: a header over a hole."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "vocab_size": 151936,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "max_position_embeddings": 40960,
        "block_size": 16,
        "num_target_layers": 36,
        "dflash_config": {
            "projector_type": "domino",
            "target_layer_ids": [1, 9, 17, 25, 33],
            "mask_token_id": 151669,
            "pure_draft_prefix_len": 1,
            "shift_label": True,
            "emb_dim": 256,
            "gru_hidden_dim": 1024,
        },
    }
    draft, _ = read(config, "8b")
    header, offset = {}, 0
    for name, shape in (backbone_shapes(draft) | head_shapes(draft)).items():
        size = 2 * int(torch.tensor(shape).prod())
        span = [offset, offset + size]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": span}
        offset += size
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    return folder


# Worked out by hand from the sizes above.
PARAMETERS_8B = {
    "head: GRU": 3 * 1024 * (4096 + 1024),
    "head: to the bottleneck": 256 * (4096 + 1024),
    "head: to the vocabulary": 151936 * 256,
    "backbone: layers": 5 * 192_946_432,
    "backbone: context": 4096 * 5 * 4096 + 4096,
    "backbone: final norm": 4096,
}


def test_inspect_of_the_released_8b(tmp_path: Path) -> None:
    status, output = command("inspect", released_8b(tmp_path / "8b"), "--json")
    found = json.loads(output)
    assert status == 0
    assert found["parameters"] == PARAMETERS_8B
    assert found["total_parameters"] == 1_104_561_408
    assert found["served_bytes"] == found["stored_bytes"] == 2 * 1_104_561_408
    assert found["kv_bytes_per_token"] == 20_480
    assert found["num_speculative_tokens"] == 16
    assert found["dtypes"] == ["BF16"]


def test_inspect_for_people(tmp_path: Path) -> None:
    status, output = command("inspect", released_8b(tmp_path / "8b"))
    assert status == 0
    for said in ("1,104,561,408", "2.06 GiB", "20.00 KiB", "16 query rows, drafts 16"):
        assert said in output
    assert "vllm serve TARGET --speculative-config '{" in output


@pytest.mark.parametrize(
    ("folder", "maker"),
    [
        ("specforge", "SpecForge"),
        ("automodel", "Automodel"),
        ("modelopt", "Model-Optimizer"),
        ("speculators", "speculators"),
    ],
)
def test_inspect_names_the_maker_and_the_fit(folder: str, maker: str) -> None:
    draft = common.DATA / folder
    status, output = command("inspect", draft, "--target", BYTES4.target, "--json")
    found = json.loads(output)
    assert status == 0
    assert found["maker"] == maker
    assert found["fit"] == {"target": str(BYTES4.target), "problem": ""}
    assert str(BYTES4.target) in found["serve"]


def test_inspect_says_what_does_not_fit() -> None:
    draft = common.DATA / "modelopt"
    status, output = command("inspect", draft, "--target", DEMO / "target", "--json")
    assert status == 1
    assert "hidden_size is 128" in json.loads(output)["fit"]["problem"]


def test_inspect_says_what_is_not_whole(tmp_path: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["norm.weight"]

    draft = copy_draft(common.DATA / "modelopt", tmp_path / "d", edit_tensors=drop)
    status, output = command("inspect", draft, "--json")
    assert status == 1
    assert "no tensor 'norm.weight'" in json.loads(output)["problem"]


def test_inspect_of_something_else() -> None:
    status, output = command("inspect", BYTES4.target)
    assert status == 1
    assert "not a Domino draft" in output
    assert "Traceback" not in output


def test_the_line_that_serves_is_for_a_shell(tmp_path: Path) -> None:
    draft = copy_draft(common.DATA / "modelopt", tmp_path / "it's a draft")
    _, output = command("inspect", draft, "--json")
    line = json.loads(output)["serve"]
    split = subprocess.run(
        ["sh", "-c", f'set -- {line}; printf "%s\\n" "$5"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(split.stdout) == {"method": "domino", "model": str(draft)}
