# SPDX-License-Identifier: Apache-2.0
"""Draft-and-verify generation under Transformers, batched and lossless.

Each round drafts a block a row, runs the target over it once, and keeps the longest
right prefix plus one token of the target's own. Greedy output is ``target.generate``'s,
token for token; sampled output has its distribution (a drafted token d is kept with
probability p(d), and else the token is drawn from p without d).
"""

import copy
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import LogitsProcessorList
from transformers.generation import logits_process as processors
from transformers.utils import ModelOutput

from vllm_domino.errors import DominoError
from vllm_domino.head import rollout
from vllm_domino.row_cache import RowCache, as_additive, causal_mask

_MASKED_ATTENTION = ("sdpa", "eager")
# Processors that look at the scores alone, so that all positions can go in one call.
_SCORES_ONLY = (
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.MinPLogitsWarper,
    processors.TypicalLogitsWarper,
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
    processors.SuppressTokensLogitsProcessor,
)
# Settings that mean another search than this one, and what they are when unused.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None,),
    "constraints": (None,),
    "stop_strings": (None,),
    "max_time": (None,),
    "prompt_lookup_num_tokens": (None,),
    "guidance_scale": (None, 1.0),
}


class GenerationError(DominoError):
    """A request that ``spec_generate`` cannot serve."""


@dataclass
class SpecGenerateOutput(ModelOutput):
    """What ``spec_generate`` returns.

    Attributes:
        sequences: (B, L) prompts and answers, laid out as ``target.generate`` does.
        acceptance_lengths: For each row, 1 + accepted drafts of each of its rounds.
        seconds: Time in "prefill", "draft", "verify" and in all ("total").
    """

    sequences: torch.Tensor = None
    acceptance_lengths: list[list[int]] = None  # type: ignore[assignment]
    seconds: dict[str, float] = None  # type: ignore[assignment]


class _Clock:
    """Adds up seconds by name; waits for a GPU so that they are its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = {"prefill": 0.0, "draft": 0.0, "verify": 0.0}
        self.started = self.last = time.perf_counter()

    def add(self, name: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[name] += now - self.last
        self.last = now

    def total(self) -> dict[str, float]:
        return {**self.seconds, "total": time.perf_counter() - self.started}


@dataclass
class _Rows:
    """The batch as it grows: row b's tokens are ``prompts[b] + answers[b]``."""

    prompts: list[list[int]]
    max_new_tokens: int
    eos: set[int]
    answers: list[list[int]] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)
    done: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.answers = [[] for _ in self.prompts]
        self.lengths = [[] for _ in self.prompts]
        self.done = [self.max_new_tokens == 0] * len(self.prompts)

    def add(self, row: int, tokens: list[int]) -> list[int]:
        """Appends to a row up to its end; what was appended."""
        room = self.max_new_tokens - len(self.answers[row])
        kept = tokens[:room]
        for i, token in enumerate(kept):
            if token in self.eos:
                kept = kept[: i + 1]
                break
        self.answers[row] += kept
        ended = bool(kept) and kept[-1] in self.eos
        self.done[row] = ended or len(self.answers[row]) >= self.max_new_tokens
        return kept


class _Chooser:
    """Picks the target's tokens: processors, then the likeliest or a draw."""

    def __init__(self, chain: LogitsProcessorList, sample: bool, padded: Any) -> None:
        self.chain = chain
        self.sample = sample
        # Processors see what they see in ``generate``: the prompt with its padding.
        self.padded: torch.Tensor = padded
        self.scores_only = all(isinstance(p, _SCORES_ONLY) for p in chain)

    def scores(
        self, logits: torch.Tensor, rows: _Rows, drafts: torch.Tensor
    ) -> torch.Tensor:
        """Processed logits of every position: (B, T, V), float32."""
        logits = logits.float()
        if self.scores_only:
            flat = logits.flatten(0, 1)
            unused = torch.zeros((len(flat), 1), dtype=torch.long, device=flat.device)
            processed: torch.Tensor = self.chain(unused, flat)
            return processed.view(logits.shape)
        output = torch.empty_like(logits)
        for row in range(len(logits)):
            if rows.done[row]:
                output[row] = logits[row]
                continue
            answer = torch.tensor(rows.answers[row], device=logits.device).long()
            prefix = torch.cat([self.padded[row], answer, drafts[row]])
            known = len(prefix) - drafts.shape[1]
            for i in range(logits.shape[1]):
                seen = prefix[None, : known + i]
                output[row, i] = self.chain(seen, logits[row, i][None])[0]
        return output

    def verify(
        self, scores: torch.Tensor, drafts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """How many drafts are kept (B,), and the token after them (B,)."""
        num_drafts = drafts.shape[1]
        if not self.sample:
            wanted = scores.argmax(-1)
            right = wanted[:, :num_drafts] == drafts
            accepted = right.long().cumprod(-1).sum(-1)
            return accepted, wanted.gather(1, accepted[:, None])[:, 0]
        probabilities = scores.softmax(-1)
        of_draft = probabilities[:, :num_drafts].gather(2, drafts[..., None])[..., 0]
        right = torch.rand_like(of_draft) < of_draft
        accepted = right.long().cumprod(-1).sum(-1)
        rows = torch.arange(len(drafts), device=drafts.device)
        after = probabilities[rows, accepted]
        if num_drafts:
            # Where a draft was refused, the token is one of the others.
            refused = accepted < num_drafts
            draft = drafts[rows, accepted.clamp(max=num_drafts - 1)]
            without = after.scatter(1, draft[:, None], 0.0)
            after = torch.where(refused[:, None], without, after)
        return accepted, torch.multinomial(after, 1)[:, 0]


class _Session:
    """One call of ``spec_generate``: the models, their caches, and a round."""

    def __init__(self, draft: Any, target: Any, num_drafts: int) -> None:
        self.draft, self.target = draft, target
        self.num_drafts = num_drafts
        config = target.config.get_text_config()
        self.embed = target.get_input_embeddings()
        self.lm_head = target.get_output_embeddings()
        self.target_cache = RowCache(config.num_hidden_layers)
        self.draft_cache = RowCache(draft.config.num_hidden_layers)
        self.last_position = config.max_position_embeddings - 1
        self.additive = target.config._attn_implementation == "eager"

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, longest: int, keep: int
    ) -> torch.Tensor:
        """The target over new tokens; logits of the last ``keep``, (B, keep, V). The
        context that drafting reads is remembered."""
        self.target_cache.place(positions, longest)
        output = self.target(
            input_ids=tokens,
            attention_mask=causal_mask(
                positions, self.target_cache.length, self.target.dtype, self.additive
            ),
            # Drafts may run past the last position; no kept token does.
            position_ids=positions.clamp(0, self.last_position),
            past_key_values=self.target_cache,
            use_cache=True,
            output_hidden_states=True,
            logits_to_keep=keep,
        )
        self.features = self.draft.context_features(output.hidden_states)
        self.positions = positions
        return output.logits

    def draft_block(self, bonus: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Drafts after the bonus tokens (B,), each row's context so long (B,)."""
        draft = self.draft
        num_rows = self.num_drafts + (0 if draft.shift_label else 1)
        queries = bonus.new_full((len(bonus), num_rows), draft.mask_token_id)
        queries[:, 0] = bonus
        steps = torch.arange(num_rows, device=bonus.device)
        positions = torch.cat([self.positions, context[:, None] + steps], dim=1)
        cache = self.draft_cache
        cache.place(self.positions, self.target_cache.length)
        slots = torch.arange(cache.length, device=bonus.device)
        visible = torch.cat(
            [
                (slots < context[:, None])[:, None].expand(-1, num_rows, -1),
                slots.new_ones((len(bonus), num_rows, num_rows), dtype=torch.bool),
            ],
            dim=-1,
        )[:, None]
        if draft.config._attn_implementation != "sdpa":
            visible = as_additive(visible, self.features.dtype)
        rows, _ = draft(
            self.embed(queries),
            self.features.to(draft.dtype),
            positions.clamp(0, self.last_position),
            visible,
            cache,
        )
        rows = rows if draft.shift_label else rows[:, 1:]
        base = self.lm_head(rows)
        if not draft.has_head:
            return base.argmax(-1)
        return rollout(draft, rows, base, bonus, self.embed)


@torch.no_grad()
def spec_generate(
    draft: Any,
    target: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    streamer: Any = None,
    num_speculative_tokens: int | None = None,
    **generate_kwargs: Any,
) -> SpecGenerateOutput:
    """See ``DominoDraftModel.spec_generate``."""
    clock = _Clock(input_ids.device)
    config = _generation_config(target, generation_config, generate_kwargs)
    num_drafts = _num_drafts(draft, num_speculative_tokens)
    _check_models(draft, target)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    rows = _make_rows(target, config, input_ids, mask)
    if streamer is not None:
        if len(input_ids) > 1:
            raise GenerationError(
                f"streamer is given with a batch of {len(input_ids)}. Stream one "
                "request at a time."
            )
        streamer.put(input_ids.cpu())

    session = _Session(draft, target, num_drafts)
    chain = target._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=input_ids.shape[1],
        device=input_ids.device,
    )
    chooser = _Chooser(chain, bool(config.do_sample), input_ids)
    none = input_ids.new_zeros((len(input_ids), 0))

    # The prompt: position of each token in its row, -1 where there is padding.
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, -1)
    longest = max(map(len, rows.prompts))
    logits = session.forward(input_ids, positions, longest, keep=1)
    _, bonus = chooser.verify(chooser.scores(logits, rows, none), none)
    context = mask.sum(-1)
    _extend(rows, bonus[:, None], None, streamer)
    clock.add("prefill")

    steps = torch.arange(num_drafts + 1, device=input_ids.device)
    while not all(rows.done):
        drafts = session.draft_block(bonus, context)
        clock.add("draft")
        tokens = torch.cat([bonus[:, None], drafts], dim=1)
        positions = context[:, None] + steps
        longest = int(positions.max()) + 1
        logits = session.forward(tokens, positions, longest, keep=num_drafts + 1)
        accepted, after = chooser.verify(chooser.scores(logits, rows, drafts), drafts)
        new = torch.cat([drafts, after[:, None]], dim=1)
        new.scatter_(1, accepted[:, None], after[:, None])
        # Rows that are done stand still, so that they cost no more slots.
        moving = torch.tensor([not done for done in rows.done], device=new.device)
        context = torch.where(moving, context + accepted + 1, context)
        bonus = torch.where(moving, after, bonus)
        _extend(rows, new, accepted, streamer)
        clock.add("verify")
    if streamer is not None:
        streamer.end()
    return SpecGenerateOutput(
        sequences=_sequences(rows, config, input_ids),
        acceptance_lengths=rows.lengths,
        seconds=clock.total(),
    )


def _extend(
    rows: _Rows, new: torch.Tensor, accepted: torch.Tensor | None, streamer: Any
) -> None:
    """Gives each row that is not done its new tokens: those accepted and one more."""
    counts = [0] * len(new) if accepted is None else accepted.tolist()
    for row, (tokens, count) in enumerate(zip(new.tolist(), counts, strict=True)):
        if rows.done[row]:
            continue
        kept = rows.add(row, tokens[: count + 1])
        if accepted is not None:
            rows.lengths[row].append(count + 1)
        if streamer is not None:
            for token in kept:
                streamer.put(torch.tensor([token]))


def _sequences(
    rows: _Rows, config: GenerationConfig, input_ids: torch.Tensor
) -> torch.Tensor:
    pad, eos = config.pad_token_id, config.eos_token_id
    if pad is None:  # as Transformers does
        pad = 0 if eos is None else eos if isinstance(eos, int) else eos[0]
    longest = max(map(len, rows.answers))
    answers = [answer + [pad] * (longest - len(answer)) for answer in rows.answers]
    return torch.cat([input_ids, input_ids.new_tensor(answers)], dim=1)


def _make_rows(
    target: Any, config: GenerationConfig, input_ids: torch.Tensor, mask: torch.Tensor
) -> _Rows:
    prompts = [
        ids[keep.bool()].tolist() for ids, keep in zip(input_ids, mask, strict=True)
    ]
    if not all(prompts):
        raise GenerationError(
            f"input_ids: row {prompts.index([])} is empty. Give it a token at least."
        )
    if not mask[:, -1].all():
        raise GenerationError(
            "attention_mask: a row ends in padding. Pad prompts on the left "
            '(tokenizer.padding_side = "left").'
        )
    max_new = config.max_new_tokens
    if max_new is None:
        max_new = config.max_length - input_ids.shape[1]
        if max_new <= 0:
            raise GenerationError(
                f"max_length is {config.max_length}, and the prompts have "
                f"{input_ids.shape[1]} tokens already. Raise it, or set max_new_tokens."
            )
    room = target.config.get_text_config().max_position_embeddings
    longest = max(map(len, prompts))
    if longest + max_new > room:
        raise GenerationError(
            f"max_new_tokens is {max_new} and the longest prompt has {longest} tokens, "
            f"but the target has {room} positions. Set at most {room - longest}."
        )
    eos = config.eos_token_id
    ids = set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
    return _Rows(prompts, max_new, ids)


def _generation_config(
    target: Any, given: GenerationConfig | None, changes: dict[str, Any]
) -> GenerationConfig:
    config = copy.deepcopy(given or target.generation_config)
    if unknown := config.update(**changes):
        raise GenerationError(
            f"spec_generate has no argument {next(iter(unknown))!r}. It takes "
            "generation_config and what a GenerationConfig takes."
        )
    for name, unused in _REFUSED.items():
        if (value := getattr(config, name, None)) not in unused:
            raise GenerationError(
                f"{name} is {value!r}: spec_generate decodes greedily or samples, one "
                "answer a row. Leave it out, or use target.generate."
            )
    if config.max_new_tokens is None and config.max_length is None:
        config.max_new_tokens = 20  # Transformers' own default
    # Transformers' processors read these as tensors.
    eos = config.eos_token_id
    if eos is not None:
        listed = [eos] if isinstance(eos, int) else list(eos)
        config._eos_token_tensor = torch.tensor(listed, device=target.device)
    return config


def _num_drafts(draft: Any, wanted: int | None) -> int:
    most: int = draft.max_drafts
    if wanted is None:
        return most
    if not 1 <= wanted <= most:
        raise GenerationError(
            f"num_speculative_tokens is {wanted}; expected 1 to {most} for this draft."
        )
    return wanted


def _check_models(draft: Any, target: Any) -> None:
    theirs, ours = target.config.get_text_config(), draft.config
    for name in ("hidden_size", "vocab_size"):
        found, wanted = getattr(ours, name), getattr(theirs, name)
        if found != wanted:
            raise GenerationError(
                f"the draft's {name} is {found}, but the target has {wanted}. Use the "
                "target that the draft was trained for."
            )
    if draft.target_layer_ids[-1] >= theirs.num_hidden_layers:
        raise GenerationError(
            f"the draft reads target layer {draft.target_layer_ids[-1]}, but the "
            f"target has {theirs.num_hidden_layers} layers. Use the target that the "
            "draft was trained for."
        )
    kinds = set(getattr(theirs, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise GenerationError(
            f"the target has {' and '.join(sorted(kinds))} layers; spec_generate's "
            "cache is for full attention. Serve it with vLLM."
        )
    attention = target.config._attn_implementation
    if attention not in _MASKED_ATTENTION:
        raise GenerationError(
            f"the target's attn_implementation is {attention!r}, which takes no mask a "
            f"row. Load it with one of {', '.join(_MASKED_ATTENTION)}."
        )
