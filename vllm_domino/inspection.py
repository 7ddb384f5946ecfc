# SPDX-License-Identifier: Apache-2.0
"""What ``vllm-domino inspect`` says of a draft: whose it is, how large, whether it fits
a target, what it takes in vLLM, and the line that serves it."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vllm_domino.checkpoint import check_tensors
from vllm_domino.config_file import read_config
from vllm_domino.draft import Draft
from vllm_domino.errors import DominoError, DraftConfigError
from vllm_domino.fit import TargetShape, require_fit
from vllm_domino.launch import Choice, serve_command, shown
from vllm_domino.weights import TensorInfo

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "BOOL": 1}
_SERVED_BYTES = 2  # of a weight or a cached value in bfloat16, what vLLM serves by
# The target's, which vLLM shares; a checkpoint may carry a copy.
_SHARED = ("embed_tokens.weight", "lm_head.weight")
_BAD = ("problem", "does not fit")
_PARTS = (
    ("head: GRU", ("prefix_gru.",)),
    ("head: to the bottleneck", ("embed_proj.0.",)),
    ("head: to the vocabulary", ("embed_proj.2.",)),
    ("backbone: layers", ("layers.",)),
    ("backbone: context", ("fc.", "hidden_norm.")),
    ("backbone: final norm", ("norm.",)),
    ("mask embedding", ("mask_embedding",)),
    ("copies of the target's", _SHARED),
    ("reduced vocabulary", ("d2t", "t2d")),
)


@dataclass(frozen=True)
class Fit:
    """Whether a draft and a target go together; ``problem`` is empty if they do."""

    target: str
    problem: str = ""


@dataclass(frozen=True)
class Inspection:
    """
    Attributes:
        parameters: How many each part has.
        stored_bytes: Of the weights as they lie there.
        served_bytes: Of what vLLM loads, in bfloat16; the target's own not counted.
        kv_bytes_per_token: Of the draft's layers in the paged cache, in bfloat16.
        problem: What is wrong with the weights, by their headers; empty if nothing is.
    """

    draft: str
    maker: str
    layout: dict[str, Any]
    num_speculative_tokens: int
    dtypes: list[str]
    parameters: dict[str, int]
    total_parameters: int
    stored_bytes: int
    served_bytes: int
    kv_bytes_per_token: int
    problem: str
    fit: Fit | None
    serve: str

    @property
    def is_sound(self) -> bool:
        return not self.problem and not (self.fit and self.fit.problem)

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)


def inspect(draft: Draft, target: str | None = None) -> Inspection:
    """Reads headers only: a draft of any size takes a moment."""
    config = draft.config
    headers = draft.headers()
    parts = dict.fromkeys((title for title, _ in _PARTS), 0)
    for name, info in headers.items():
        parts[_part_of(name, config.has_reduced_vocab)] += info.num_elements
    own = [
        info
        for name, info in headers.items()
        if config.has_reduced_vocab or name not in _SHARED
    ]
    served_by = target or draft.verifier or "TARGET"
    return Inspection(
        draft=draft.source,
        maker=draft.maker.title,
        layout=config.model_dump(mode="json", exclude_none=True),
        num_speculative_tokens=config.max_drafts,
        dtypes=sorted({info.dtype for info in headers.values()}),
        parameters={title: count for title, count in parts.items() if count},
        total_parameters=sum(parts.values()),
        stored_bytes=sum(
            info.num_elements * _BYTES.get(info.dtype, 1) for info in headers.values()
        ),
        served_bytes=sum(info.num_elements for info in own) * _SERVED_BYTES,
        kv_bytes_per_token=2
        * config.num_hidden_layers
        * config.num_key_value_heads
        * config.head_dim
        * _SERVED_BYTES,
        problem=_problem(draft, headers),
        fit=None if target is None else fit(draft, target),
        serve=shown(serve_command(served_by, Choice(draft.source), [])),
    )


def fit(draft: Draft, target: str) -> Fit:
    """Compares a draft with a target's config.json."""
    try:
        require_fit(draft.config, draft.source, _shape_of(target))
    except DraftConfigError as error:
        return Fit(target, str(error))
    return Fit(target)


def _shape_of(target: str) -> TargetShape:
    raw = read_config(target)
    # Multimodal models keep the language model's fields in a section of their own.
    text = raw.get("text_config")
    fields = raw | text if isinstance(text, dict) else raw
    names = ("hidden_size", "vocab_size", "num_hidden_layers")
    if missing := [name for name in names if not isinstance(fields.get(name), int)]:
        raise DraftConfigError(
            f"{target}: config.json has no {missing[0]}, so it is no language model's. "
            "Give the target's folder or hub id."
        )
    hidden_size, vocab_size, num_layers = (fields[name] for name in names)
    return TargetShape(target, hidden_size, vocab_size, num_layers)


def _part_of(name: str, has_reduced_vocab: bool) -> str:
    if has_reduced_vocab and name == "lm_head.weight":
        return "reduced vocabulary"
    for title, prefixes in _PARTS:
        if name.startswith(prefixes):
            return title
    return "reduced vocabulary"


def _problem(draft: Draft, headers: Mapping[str, TensorInfo]) -> str:
    shapes = {name: info.shape for name, info in headers.items()}
    try:
        check_tensors(draft.config, draft.maker, shapes, draft.source)
    except DominoError as error:
        return str(error)
    return ""


def as_tables(found: Inspection) -> RenderableType:
    """For people; the line that serves it is to be printed unwrapped."""
    return Group(_facts(found), Text(), _parameters(found), Text())


def _facts(found: Inspection) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(found):
        # As it is: a path may hold what rich takes for markup.
        table.add_row(name, Text(value, style="bold red" if name in _BAD else ""))
    return table


def _rows(found: Inspection) -> Iterator[tuple[str, str]]:
    layout = found.layout
    yield "draft", found.draft
    yield "maker", found.maker
    yield (
        "block",
        f"{layout['block_size']} query rows, drafts {found.num_speculative_tokens} "
        f"(shift_label {str(layout['shift_label']).lower()}), the first "
        f"{layout['pure_draft_prefix_len']} uncorrected",
    )
    yield (
        "backbone",
        f"{layout['num_hidden_layers']} layers, H {layout['hidden_size']}, "
        f"{layout['num_attention_heads']}/{layout['num_key_value_heads']} heads of "
        f"{layout['head_dim']}, MLP {layout['intermediate_size']}",
    )
    yield "context", f"target layers {layout['target_layer_ids']}"
    yield (
        "head",
        f"GRU {layout['gru_hidden_dim']}, bottleneck {layout['emb_dim']}, vocabulary "
        f"{layout.get('draft_vocab_size', layout['vocab_size'])} of "
        f"{layout['vocab_size']}",
    )
    yield "mask token", str(layout["mask_token_id"])
    yield "weights", f"{', '.join(found.dtypes)}, {_size(found.stored_bytes)} on disk"
    yield (
        "in vLLM",
        f"{_size(found.served_bytes)} of weights and "
        f"{_size(found.kv_bytes_per_token)} of KV cache a token, in bfloat16",
    )
    if found.problem:
        yield "problem", found.problem
    if found.fit is not None and found.fit.problem:
        yield "does not fit", found.fit.problem
    elif found.fit is not None:
        yield "fits", found.fit.target


def _parameters(found: Inspection) -> Table:
    table = Table(title="parameters", title_justify="left", box=None, pad_edge=False)
    table.add_column("part")
    table.add_column("", justify="right")
    for title, count in found.parameters.items():
        table.add_row(title, f"{count:,}")
    table.add_row("all", f"{found.total_parameters:,}", style="bold")
    return table


def _size(count: int) -> str:
    units = ("B", "KiB", "MiB", "GiB")
    power = min(int(math.log(max(count, 1), 1024)), len(units) - 1)
    return f"{count / 1024**power:.{0 if power == 0 else 2}f} {units[power]}"
