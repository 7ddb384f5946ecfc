# SPDX-License-Identifier: Apache-2.0
"""Training's forward against blocks done one at a time; curriculum; data; refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

from tests.engines import BYTES4
from vllm_domino.errors import DominoError
from vllm_domino.modeling_domino import DominoConfig, DominoDraftModel
from vllm_domino.training.blocks import DraftObjective, Losses, sample_anchors
from vllm_domino.training.curriculum import base_weight, position_weights
from vllm_domino.training.data import PADDING, Document, PackedData, Packs
from vllm_domino.training.generate import _finished, read_prompts
from vllm_domino.training.recipe import Recipe, RecipeError
from vllm_domino.training.trainer import Trainer

VOCAB, WIDTH = 61, 32


def make_recipe(**changes: Any) -> Recipe:
    fields: dict[str, Any] = {
        "target": str(BYTES4.target),
        "data": "answers.jsonl",
        "output": "run",
        "draft": {"mask_token_id": 287},
        "sequence_length": 512,
        "steps": 100,
        "dtype": "float32",
    }
    return Recipe.model_validate(fields | changes)


def make_draft(shift_label: bool, prefix: int, projector: str | None) -> Any:
    section: dict[str, Any] = {
        "target_layer_ids": [0, 2],
        "mask_token_id": 60,
    }
    if projector:
        section |= {
            "projector_type": projector,
            "shift_label": shift_label,
            "pure_draft_prefix_len": prefix,
            "emb_dim": 8,
            "gru_hidden_dim": 12,
        }
    config = DominoConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        block_size=5,
        num_target_layers=4,
        dflash_config=section,
        attn_implementation="sdpa",
    )
    torch.manual_seed(3)
    draft = DominoDraftModel(config)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return draft.double()


def make_packs() -> Packs:
    generator = torch.Generator().manual_seed(5)
    documents = []
    for length, start in ((23, 7), (9, 2), (17, 4), (30, 20), (6, 1), (13, 3)):
        tokens = torch.randint(0, 60, (length,), generator=generator).tolist()
        documents.append(Document(tokens, start))
    return PackedData(documents, 50, 2, seed=1).microbatch(0)


def one_at_a_time(
    draft: Any,
    packs: Packs,
    anchors: torch.Tensor,
    features: torch.Tensor,
    embed: torch.nn.Module,
    lm_head: torch.nn.Module,
    weights: torch.Tensor,
    lam: float,
) -> torch.Tensor:
    """The loss with every block alone: no mask, no packing, the head step by step."""
    sums, weight = torch.zeros(2, dtype=torch.float64), torch.zeros(())
    for pack in range(len(anchors)):
        for anchor in anchors[pack].tolist():
            if anchor == PADDING:
                continue
            document = packs.documents[pack, anchor]
            inside = packs.documents[pack] == document
            before = inside & (torch.arange(len(inside)) < anchor)
            start = int(packs.positions[pack, anchor])
            queries = torch.full((1, draft.block_size), draft.mask_token_id)
            queries[0, 0] = packs.tokens[pack, anchor]
            rows, _ = draft(
                embed(queries),
                features[pack][before][None],
                torch.arange(start + draft.block_size)[None],
            )
            rows = rows[0] if draft.shift_label else rows[0, 1:]
            state = None
            for i, row in enumerate(rows):
                at = anchor + i + 1
                if at >= len(inside) or not inside[at]:
                    break
                base = final = lm_head(row)
                if draft.has_head:
                    token = embed(packs.tokens[pack, at - 1][None])
                    state = (
                        draft.initial_state(token)
                        if state is None
                        else draft.advance(token, state)
                    )
                    if i >= draft.pure_draft_prefix_len:
                        projected = draft.project_hidden(row[None])
                        final = base + draft.correction(projected, state)[0]
                if packs.is_answer[pack, at]:
                    label = packs.tokens[pack, at]
                    losses = [F.cross_entropy(x, label) for x in (base, final)]
                    sums = sums + weights[i] * torch.stack(losses)
                    weight = weight + weights[i]
    base_loss, final_loss = sums / weight
    if not draft.has_head:
        return base_loss
    return (1 - lam) * final_loss + lam * base_loss


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("shift_label", "prefix", "projector", "lam"),
    [
        (True, 1, "domino", 0.0),
        (True, 1, "domino", 0.6),
        (False, 0, "domino", 0.3),
        (False, 2, "domino", 1.0),
        (False, 0, None, 0.5),
    ],
)
def test_all_blocks_at_once_are_blocks_one_at_a_time(
    shift_label: bool, prefix: int, projector: str | None, lam: float, attention: str
) -> None:
    draft = make_draft(shift_label, prefix, projector)
    packs = make_packs()
    anchors = sample_anchors(packs, 6, torch.Generator().manual_seed(2))
    torch.manual_seed(4)
    features = torch.randn(2, 50, 2 * WIDTH, dtype=torch.float64)
    embed = torch.nn.Embedding(VOCAB, WIDTH).double().requires_grad_(False)
    lm_head = torch.nn.Linear(WIDTH, VOCAB, bias=False).double().requires_grad_(False)
    weights = position_weights(make_recipe(gamma=3.0), draft.max_drafts).double()
    expected = one_at_a_time(
        draft, packs, anchors, features, embed, lm_head, weights, lam
    )
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in draft.named_parameters()}
    draft.zero_grad()
    draft.set_attn_implementation(attention)
    # A chunk size that divides nothing.
    objective = DraftObjective(draft, weights, loss_rows=7)
    losses = objective(features, packs, anchors, embed, lm_head, lam)
    losses.total.backward()
    assert abs((losses.total - expected).item()) < 1e-8
    assert all(g.abs().max() > 0 for n, g in gradients.items() if lam < 1 or "fc" in n)
    for name, parameter in draft.named_parameters():
        difference = (parameter.grad - gradients[name]).abs().max()
        assert difference < 1e-8, name


def test_anchors_start_blocks_that_have_something_to_predict() -> None:
    packs = make_packs()
    anchors = sample_anchors(packs, 200, torch.Generator().manual_seed(0))
    assert anchors.shape == (2, 200)
    for pack in range(2):
        chosen = [a for a in anchors[pack].tolist() if a != PADDING]
        assert len(set(chosen)) == len(chosen) > 0
        for anchor in chosen:
            assert packs.is_answer[pack, anchor]
            assert packs.is_answer[pack, anchor + 1]
            assert packs.documents[pack, anchor] == packs.documents[pack, anchor + 1]
            assert packs.positions[pack, anchor] > 0


def test_no_logits_are_kept_for_the_backward() -> None:
    draft = make_draft(True, 1, "domino")
    packs = make_packs()
    anchors = sample_anchors(packs, 8, torch.Generator().manual_seed(2))
    features = torch.randn(2, 50, 2 * WIDTH, dtype=torch.float64)
    embed = torch.nn.Embedding(VOCAB, WIDTH).double().requires_grad_(False)
    lm_head = torch.nn.Linear(WIDTH, VOCAB, bias=False).double().requires_grad_(False)
    objective = DraftObjective(draft, torch.ones(5).double(), loss_rows=16)
    kept: list[torch.Size] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        objective(features, packs, anchors, embed, lm_head, 0.5)
    logits = [shape for shape in kept if shape[-1:] == (VOCAB,) and len(shape) > 1]
    assert kept
    assert logits == []


def test_acceptance_lengths_count_right_drafts_in_a_row() -> None:
    from vllm_domino.training.blocks import _acceptance

    right = torch.tensor([[[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1]]]).bool()
    counts = torch.tensor([[[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]]]).bool()
    assert float(_acceptance(right, counts)) == pytest.approx(1 + (2 + 2 + 0) / 3)
    assert set(Losses.__annotations__) >= {"base_acceptance", "final_acceptance"}


def test_lambda_falls_in_a_line_to_zero_and_stays() -> None:
    recipe = make_recipe(lambda_start=0.8, decay_ratio=0.5, steps=100)
    assert base_weight(recipe, 0) == 0.8
    assert base_weight(recipe, 25) == pytest.approx(0.4)
    assert base_weight(recipe, 49) == pytest.approx(0.016)
    assert base_weight(recipe, 50) == 0
    assert base_weight(recipe, 99) == 0
    assert base_weight(make_recipe(lambda_start=0.0), 0) == 0
    assert base_weight(make_recipe(decay_ratio=0.0), 0) == 0


def test_packs_hold_every_document_once_an_epoch_in_an_order_of_the_seed() -> None:
    documents = [Document([i] * (3 + i % 5), 1) for i in range(40)]
    data = PackedData(documents, 16, 1, seed=9)
    batches = [data.microbatch(i) for i in range(data._num_batches(0))]
    seen = torch.cat([b.tokens[b.documents != PADDING] for b in batches])
    assert torch.equal(
        seen.bincount(), torch.tensor([len(d.tokens) for d in documents])
    )
    again = PackedData(documents, 16, 1, seed=9).microbatch(3)
    assert torch.equal(again.tokens, batches[3].tokens)
    assert any(
        not torch.equal(PackedData(documents, 16, 1, 8).microbatch(i).tokens, b.tokens)
        for i, b in enumerate(batches[:5])
    )


# --- Refusals ---


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text(
        "".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows)
    )
    return path


GOOD = {"index": 0, "prompt_ids": [1, 2, 3], "answer_ids": [4, 5, 6]}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the file is empty"),
        ([GOOD, "{broken\n"], ":2: not JSON"),
        ([GOOD, "[1]\n"], ":2: expected a JSON object"),
        ([GOOD, {"prompt_ids": [1]}], ":2: answer_ids must be a list of token ids"),
        ([{**GOOD, "answer_ids": [288]}], ":1: answer_ids must be .* from 0 to 287"),
        (
            [{**GOOD, "answer_ids": [5] * 2046}],
            ":1: 2049 tokens, .* has 2048",
        ),
        ([{**GOOD, "answer_ids": [5]}], "nothing to draft"),
    ],
)
def test_bad_data_is_refused_with_its_line(
    lines: list[Any], message: str, tmp_path: Path
) -> None:
    data = write_lines(tmp_path / "answers.jsonl", *lines)
    recipe = make_recipe(data=data, output=tmp_path / "run")
    with pytest.raises(RecipeError, match=message):
        Trainer(recipe, console=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"draft": {"mask_token_id": 287, "target_layer_ids": [0, 4]}},
            "asks for layer 4, but .* has 4 layers",
        ),
        ({"draft": {}}, "mask_token_id would be 288, .* no room for a mask token"),
        ({"sequence_length": 4096}, "sequence_length is 4096, .* has 2048 positions"),
        ({"target": "/no/such/target"}, "target: '/no/such/target' cannot be loaded"),
        ({"data": "/no/such.jsonl"}, "/no/such.jsonl: no such file"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    data = write_lines(tmp_path / "answers.jsonl", GOOD)
    recipe = make_recipe(**{"data": data, "output": tmp_path / "run", **changes})
    with pytest.raises(DominoError, match=message):
        Trainer(recipe, console=None)  # type: ignore[arg-type]


def test_a_recipe_file_names_the_field(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"target": "t", "data": "d", "output": "o"}))
    with pytest.raises(RecipeError, match="steps: field required"):
        Recipe.read(path)
    path.write_text("target: [")
    with pytest.raises(RecipeError, match="not a readable YAML file"):
        Recipe.read(path)


@pytest.mark.parametrize("path", sorted(Path("configs/train").glob("*.yaml")), ids=str)
def test_every_shipped_recipe_is_whole(path: Path) -> None:
    assert Recipe.read(path).steps > 0


# --- Prompts ---


def test_prompts_of_every_kind_are_read(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    path = write_lines(
        tmp_path / "prompts.jsonl", {"messages": chat}, {"prompt": "a"}, {"text": "b"}
    )
    assert read_prompts(str(path), "train", None) == [chat[:1], "a", "b"]
    with pytest.raises(RecipeError, match=":2: no prompt in 'messages'"):
        read_prompts(str(path), "train", "messages")


def test_a_cut_off_last_answer_is_asked_for_again(tmp_path: Path) -> None:
    whole = json.dumps({"index": 0}) + "\n" + json.dumps({"index": 4}) + "\n"
    path = tmp_path / "answers.jsonl"
    path.write_text(whole + '{"index": 7, "prompt')
    assert _finished(path) == {0, 4}
    assert path.read_text() == whole
