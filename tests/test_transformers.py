# SPDX-License-Identifier: Apache-2.0
"""The Transformers model and ``spec_generate``, against goldens and ``generate``."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, Qwen3ForCausalLM

from tests.drafts import copy_draft, plain_dflash_draft, random_unshifted_draft
from tests.engines import BYTES4, PAIRS, Pair
from tests.reference import Reference
from tests.statistics import SMALLEST_P, p_value
from vllm_domino.errors import CheckpointError, DraftConfigError
from vllm_domino.generation import GenerationError
from vllm_domino.head import rollout
from vllm_domino.modeling_domino import DominoConfig, DominoDraftModel

RELATIVE = 1e-5
# 20,000 draws take two minutes a case here; every test run makes a few.
FEW_DRAWS, DRAWS = 2_000, 20_000
ROWS = 1000  # of one sampled batch
SAMPLED_PROMPT = 1
SLOW = pytest.mark.slow


def load_target(pair: Pair, attention: str = "sdpa") -> Any:
    return Qwen3ForCausalLM.from_pretrained(
        pair.target, dtype=torch.float32, attn_implementation=attention
    )


@pytest.fixture(scope="module", params=PAIRS, ids=lambda pair: pair.folder.name)
def pair(request: pytest.FixtureRequest) -> Pair:
    chosen: Pair = request.param
    return chosen


@pytest.fixture(scope="module")
def models(pair: Pair) -> tuple[Any, Any]:
    return DominoDraftModel.from_pretrained(pair.draft), load_target(pair)


@pytest.fixture(scope="module")
def bytes4() -> tuple[Any, Any]:
    return DominoDraftModel.from_pretrained(BYTES4.draft), load_target(BYTES4)


def batch(prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded prompts and their mask."""
    width = max(map(len, prompts))
    padding = [width - len(prompt) for prompt in prompts]
    ids = [[257] * n + p for n, p in zip(padding, prompts, strict=True)]
    mask = [[0] * n + [1] * (width - n) for n in padding]
    return torch.tensor(ids), torch.tensor(mask)


# --- The model ---


@torch.no_grad()
def forward(
    draft: Any, target: Any, context: list[int], bonus: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], list[int]]:
    """Rows, layers' outputs and drafts of one block."""
    embed = target.get_input_embeddings()
    hidden = target(torch.tensor([context]), output_hidden_states=True).hidden_states
    queries = torch.full((1, draft.block_size), draft.mask_token_id)
    queries[0, 0] = bonus
    rows, layers = draft(
        embed(queries),
        draft.context_features(hidden),
        torch.arange(len(context) + draft.block_size)[None],
        output_hidden_states=True,
    )
    tokens = rollout(draft, rows, target.lm_head(rows), queries[:, 0], embed)
    return rows, layers, tokens[0].tolist()


def test_drafts_are_golden_and_hidden_states_the_references(
    pair: Pair, models: tuple[Any, Any]
) -> None:
    draft, target = models
    reference = Reference(pair.target, pair.draft)
    for step in pair.golden["steps"][::7]:
        sequence = pair.prompts[step["prompt"]] + pair.golden["outputs"][step["prompt"]]
        context = sequence[: step["context"]]
        _, layers, tokens = forward(draft, target, context, step["bonus"])
        assert tokens == step["draft"]
        expected = reference.draft(context, step["bonus"], draft.max_drafts).layers
        for found, wanted in zip(layers, expected, strict=True):
            error = torch.linalg.vector_norm(found[0] - wanted)
            assert error / torch.linalg.vector_norm(wanted) < RELATIVE


def test_saving_and_loading_keeps_names_and_bits(
    pair: Pair, models: tuple[Any, Any], tmp_path: Path
) -> None:
    models[0].save_pretrained(tmp_path)
    original = load_file(pair.draft / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert original.keys() == saved.keys()
    assert all(torch.equal(saved[name], original[name]) for name in original)
    again = DominoDraftModel.from_pretrained(tmp_path)
    assert isinstance(again, DominoDraftModel)


def test_auto_classes_know_it() -> None:
    config = DominoConfig.from_pretrained(BYTES4.draft)
    assert isinstance(AutoModel.from_config(config), DominoDraftModel)


@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
def test_attention_implementations_agree(
    attention: str, bytes4: tuple[Any, Any]
) -> None:
    draft, target = bytes4
    other = DominoDraftModel.from_pretrained(
        BYTES4.draft, attn_implementation=attention
    )
    context = BYTES4.prompts[0]
    expected = forward(draft, target, context, 10)[0]
    found = forward(other, target, context, 10)[0]
    assert (found - expected).abs().max() < RELATIVE * expected.abs().max()


def test_xformers_is_refused_on_a_cpu(bytes4: tuple[Any, Any]) -> None:
    other = DominoDraftModel.from_pretrained(
        BYTES4.draft, attn_implementation="xformers"
    )
    with pytest.raises(RuntimeError, match=r"runs on CUDA only, .* is on cpu"):
        forward(other, bytes4[1], BYTES4.prompts[0], 10)


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    missing = copy_draft(
        BYTES4.draft,
        tmp_path / "missing",
        edit_tensors=lambda tensors: tensors.pop("prefix_gru.weight_ih_l0"),
    )
    with pytest.raises(CheckpointError, match=r"no tensor 'prefix_gru\.weight_ih_l0'"):
        DominoDraftModel.from_pretrained(missing)
    bad = copy_draft(
        BYTES4.draft,
        tmp_path / "bad",
        lambda config: config["dflash_config"].update(projector_type="waltz"),
    )
    with pytest.raises(DraftConfigError, match="projector_type is 'waltz'"):
        DominoDraftModel.from_pretrained(bad)


# --- spec_generate, greedy ---


def golden_accepted(pair: Pair, prompt: int) -> list[int]:
    return [s["accepted"] for s in pair.golden["steps"] if s["prompt"] == prompt]


def test_sixteen_ragged_rows_are_golden_and_so_are_the_counts(
    pair: Pair, models: tuple[Any, Any]
) -> None:
    draft, target = models
    ids, mask = batch(pair.prompts)
    output = draft.spec_generate(
        target, ids, mask, max_new_tokens=100, do_sample=False, eos_token_id=None
    )
    assert output.sequences[:, : ids.shape[1]].equal(ids)
    assert output.sequences[:, ids.shape[1] :].tolist() == pair.golden["outputs"]
    # Both count a round's accepted drafts before max_new_tokens cuts the last one.
    for prompt, lengths in enumerate(output.acceptance_lengths):
        assert [n - 1 for n in lengths] == golden_accepted(pair, prompt)
    assert sum(map(len, output.acceptance_lengths)) == pair.golden["drafts"]
    assert output.seconds["total"] >= output.seconds["verify"] > 0


@pytest.mark.parametrize("prompt", [0, 3, 9])
def test_one_row_is_golden(pair: Pair, models: tuple[Any, Any], prompt: int) -> None:
    draft, target = models
    ids = torch.tensor([pair.prompts[prompt]])
    output = draft.spec_generate(
        target, ids, max_new_tokens=100, do_sample=False, eos_token_id=None
    )
    answer = output.sequences[0, ids.shape[1] :].tolist()
    assert answer == pair.golden["outputs"][prompt]
    assert [n - 1 for n in output.acceptance_lengths[0]] == golden_accepted(
        pair, prompt
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"eos_token_id": [10, 41], "pad_token_id": 257},  # newline, ")"
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 3},
        {"min_new_tokens": 12, "eos_token_id": 10, "pad_token_id": 257},
        {"bad_words_ids": [[32, 32]]},
        {"max_new_tokens": 1},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_it_is_plain_generation(
    settings: dict[str, Any], bytes4: tuple[Any, Any]
) -> None:
    draft, target = bytes4
    ids, mask = batch(BYTES4.prompts[:6])
    settings = {"max_new_tokens": 30, "do_sample": False} | settings
    expected = target.generate(ids, attention_mask=mask, **settings)
    found = draft.spec_generate(target, ids, mask, **settings).sequences
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["short", "unshifted", "dflash", "eager"])
def test_other_drafts_leave_the_output_alone(
    kind: str, bytes4: tuple[Any, Any], tmp_path: Path
) -> None:
    draft, target = bytes4
    extra: dict[str, Any] = {}
    if kind == "short":
        extra["num_speculative_tokens"] = 3
    elif kind == "eager":
        target = load_target(BYTES4, "eager")
        draft = DominoDraftModel.from_pretrained(
            BYTES4.draft, attn_implementation="eager"
        )
    else:
        make = random_unshifted_draft if kind == "unshifted" else plain_dflash_draft
        draft = DominoDraftModel.from_pretrained(make(BYTES4.draft, tmp_path / "draft"))
    ids, mask = batch(BYTES4.prompts[:5])
    output = draft.spec_generate(
        target,
        ids,
        mask,
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        **extra,
    )
    answers = output.sequences[:, ids.shape[1] :].tolist()
    assert answers == [golden[:24] for golden in BYTES4.golden["outputs"][:5]]
    most = 1 + extra.get("num_speculative_tokens", draft.max_drafts)
    assert all(1 <= n <= most for row in output.acceptance_lengths for n in row)


def test_unshifted_drafts_are_the_references(tmp_path: Path) -> None:
    folder = random_unshifted_draft(BYTES4.draft, tmp_path / "draft")
    draft = DominoDraftModel.from_pretrained(folder)
    target = load_target(BYTES4)
    reference = Reference(BYTES4.target, folder)
    from vllm_domino.generation import _Session

    for prompt in BYTES4.prompts[:6]:
        session = _Session(draft, target, draft.max_drafts)
        positions = torch.arange(len(prompt))[None]
        with torch.no_grad():
            session.forward(torch.tensor([prompt]), positions, len(prompt), keep=1)
            found = session.draft_block(torch.tensor([65]), torch.tensor([len(prompt)]))
        assert found[0].tolist() == reference.draft(prompt, 65, 7).tokens


def test_a_streamer_gets_the_prompt_and_then_each_token(
    bytes4: tuple[Any, Any],
) -> None:
    class Collector:
        def __init__(self) -> None:
            self.values: list[Any] = []

        def put(self, value: torch.Tensor) -> None:
            self.values.append(value.tolist())

        def end(self) -> None:
            self.values.append("end")

    draft, target = bytes4
    collector = Collector()
    ids = torch.tensor([BYTES4.prompts[2]])
    draft.spec_generate(
        target, ids, streamer=collector, max_new_tokens=9, do_sample=False
    )
    golden = BYTES4.golden["outputs"][2][:9]
    assert collector.values == [ids.tolist(), *([token] for token in golden), "end"]
    with pytest.raises(GenerationError, match="one request at a time"):
        draft.spec_generate(target, *batch(BYTES4.prompts[:2]), streamer=collector)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 4}, "num_beams is 4"),
        ({"stop_strings": ["x"]}, "stop_strings"),
        ({"nonsense": 1}, "no argument 'nonsense'"),
        ({"num_speculative_tokens": 9}, "num_speculative_tokens is 9; expected 1 to 8"),
        ({"max_new_tokens": 2000}, "the target has 2048 positions. Set at most"),
        ({"attention_mask": torch.zeros(1, 77)}, "row 0 is empty"),
        ({"attention_mask": torch.eye(77)[:1].cumsum(1).flip(1)}, "is empty|padding"),
    ],
)
def test_what_cannot_be_served_is_refused(
    settings: dict[str, Any], message: str, bytes4: tuple[Any, Any]
) -> None:
    draft, target = bytes4
    ids = torch.tensor([BYTES4.prompts[0]])
    if "attention_mask" in settings and settings["attention_mask"].sum() > 0:
        settings["attention_mask"] = torch.ones_like(ids)
        settings["attention_mask"][0, -3:] = 0
    with pytest.raises(GenerationError, match=message):
        draft.spec_generate(target, ids, **settings)


# --- spec_generate, sampled ---


@torch.no_grad()
def pair_probabilities(target: Any, settings: dict[str, Any]) -> torch.Tensor:
    """(V * V,) of the first two tokens, through Transformers' own processors."""
    config = target.generation_config.to_dict() | {"do_sample": True} | settings
    chain = target._get_logits_processor(type(target.generation_config)(**config))
    prompt = torch.tensor(BYTES4.prompts[SAMPLED_PROMPT])
    vocab = target.config.vocab_size
    continued = torch.cat(
        [prompt.expand(vocab, -1), torch.arange(vocab)[:, None]], dim=1
    )
    first, second = (
        chain(tokens, target(tokens).logits[:, -1].float()).double().softmax(-1)
        for tokens in (prompt[None], continued)
    )
    return (first[0][:, None] * second).flatten()


@pytest.mark.parametrize("draws", [FEW_DRAWS, pytest.param(DRAWS, marks=SLOW)])
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 8},
        {"temperature": 1.2, "top_p": 0.9},
    ],
    ids=["temperature", "top_k", "top_p"],
)
def test_two_sampled_tokens_have_the_targets_distribution(
    settings: dict[str, Any], draws: int, bytes4: tuple[Any, Any]
) -> None:
    draft, target = bytes4
    settings = {"top_k": 0, "top_p": 1.0} | settings
    ids = torch.tensor([BYTES4.prompts[SAMPLED_PROMPT]] * ROWS)
    vocab = target.config.vocab_size
    observed = torch.zeros(vocab * vocab, dtype=torch.float64)
    for seed in range(draws // ROWS):
        torch.manual_seed(seed)
        output = draft.spec_generate(
            target, ids, max_new_tokens=2, do_sample=True, eos_token_id=None, **settings
        )
        first, second = output.sequences[:, -2:].T
        observed += (first * vocab + second).bincount(minlength=vocab * vocab)
    assert observed.sum() == draws
    p = p_value(observed, pair_probabilities(target, settings))
    print(f"{settings}: {draws} draws, p = {p:.3f}")
    assert p > SMALLEST_P
    # And the test can tell another temperature: half as hot again, or, with many draws,
    # a tenth.
    factor = 1.5 if draws == FEW_DRAWS else 1.1
    other = settings | {"temperature": settings["temperature"] * factor}
    assert p_value(observed, pair_probabilities(target, other)) < SMALLEST_P
