# SPDX-License-Identifier: Apache-2.0
"""The head's step in Triton kernels, each with its twin in torch.

    advance            the GRU after a token, its embedding looked up: weights read once
    bottleneck         c = silu(z + W1 h)
    likeliest          the likeliest token of base + W2 c: of each tile of the
                       vocabulary, then of the tiles' (two kernels)
    likeliest_of_pool  the same of each request's own few tokens

Shapes are fixed and nothing is read by the host, so a CUDA graph holds them all. They
round where torch does: products are summed in float32 and rounded to the weights' type,
then added to what was rounded, and the sum rounded. What differs is the order of sums.

Of equal scores the lowest id wins, and what is not a number beats all, as in
``torch.max``: score and id are packed into one whole number, of which the largest wins.
A float32's bits are in the order of the numbers once those of negative ones are
flipped; behind them the id, counted down.

Shapes: B requests, H width, G GRU, E bottleneck, V vocabulary.
"""

import os

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

# tl.dot takes no less than 16 rows.
_BLOCK_B = 16
_BLOCK_G = 16
_BLOCK_E = 64
_BLOCK_V = 128
_BLOCK_K = 128  # of what is summed over
# Triton's interpreter multiplies bfloat16's bits as if they were whole numbers.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


# --- Twins ---


def advance_twin(
    tokens: torch.Tensor,
    state: torch.Tensor,
    table: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
) -> torch.Tensor:
    """The GRU's state after these tokens: (B,), (B, G), (V, H) -> (B, G)."""
    gates = F.linear(table[tokens], weight_ih).float()
    recurrent = F.linear(state, weight_hh).float()
    reset_x, update_x, new_x = gates.chunk(3, dim=-1)
    reset_h, update_h, new_h = recurrent.chunk(3, dim=-1)
    reset = torch.sigmoid(reset_x + reset_h)
    update = torch.sigmoid(update_x + update_h)
    new = torch.tanh(new_x + reset * new_h)
    return (new + update * (state.float() - new)).to(state.dtype)


def bottleneck_twin(
    projected: torch.Tensor, state: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """silu(z + W1 h): (B, E), (B, G), (E, G) -> (B, E)."""
    return F.silu(projected + F.linear(state, weight))


def likeliest_twin(
    base: torch.Tensor, inner: torch.Tensor | None, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest of base + W2 c, value in float32 and id: (B, V), (B, E), (V, E) ->
    (B,), (B,). Of base alone if there is no c."""
    scores = base if inner is None else base + F.linear(inner, weight)
    values, ids = scores.float().max(dim=-1)
    return values, ids


def likeliest_of_pool_twin(
    base: torch.Tensor, inner: torch.Tensor, weight: torch.Tensor, pool: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of each request's own tokens: (B, C), (B, E), (B, C, E), (B, C) ids,
    rising."""
    scores = base + torch.bmm(weight, inner[:, :, None]).squeeze(-1)
    values, places = scores.float().max(dim=-1)
    return values, pool.gather(-1, places[:, None]).squeeze(-1)


# --- Kernels ---


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    # Of |x|, so that nothing overflows.
    e = tl.exp(-2 * tl.abs(x))
    t = (1 - e) / (1 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    x_rows,
    row_in,
    w_rows,
    w_in,
    SIZE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x W^T of rows of x (pointers to their first number) and of W, in float32."""
    acc = tl.zeros((BLOCK_B, BLOCK_N), dtype=tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        k_in = k < SIZE
        x = tl.load(
            x_rows[:, None] + k[None, :], mask=row_in[:, None] & k_in[None, :], other=0
        )
        w = tl.load(
            w_rows[None, :] + k[:, None], mask=w_in[None, :] & k_in[:, None], other=0
        )
        if INTERPRETED:
            x, w = x.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    return acc


@triton.jit
def _gate(  # type: ignore[no-untyped-def]
    NUMBER: tl.constexpr,
    x_rows,
    h_rows,
    row_in,
    weight_ih_ptr,
    weight_hh_ptr,
    units,
    H: tl.constexpr,
    G: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """What one of the GRU's gates gets of the token and of the state, each rounded."""
    dtype = weight_ih_ptr.dtype.element_ty
    unit_in = units < G
    w_rows = NUMBER * G + units
    of_x = _product(
        x_rows,
        row_in,
        weight_ih_ptr + w_rows * H,
        unit_in,
        H,
        BLOCK_B,
        BLOCK_G,
        BLOCK_K,
    )
    of_h = _product(
        h_rows,
        row_in,
        weight_hh_ptr + w_rows * G,
        unit_in,
        G,
        BLOCK_B,
        BLOCK_G,
        BLOCK_K,
    )
    return of_x.to(dtype).to(tl.float32), of_h.to(dtype).to(tl.float32)


@triton.jit
def _is_idle(todo_ptr, CONDITIONAL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether there is nothing to do."""
    idle = False
    if CONDITIONAL:
        idle = tl.load(todo_ptr) == 0
    return idle


@triton.jit
def _advance_kernel(  # type: ignore[no-untyped-def]
    todo_ptr,
    tokens_ptr,
    state_ptr,
    table_ptr,
    weight_ih_ptr,
    weight_hh_ptr,
    out_ptr,
    num_reqs,
    state_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    CONDITIONAL: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if _is_idle(todo_ptr, CONDITIONAL):
        return
    units = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    rows = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    unit_in = units < G
    row_in = rows < num_reqs
    tokens = tl.load(tokens_ptr + rows, mask=row_in, other=0).to(tl.int64)
    x_rows = table_ptr + tokens * H
    h_rows = state_ptr + rows.to(tl.int64) * state_stride
    dtype = state_ptr.dtype.element_ty

    reset_x, reset_h = _gate(
        0, x_rows, h_rows, row_in, weight_ih_ptr, weight_hh_ptr, units,
        H, G, BLOCK_B, BLOCK_G, BLOCK_K,
    )  # fmt: skip
    update_x, update_h = _gate(
        1, x_rows, h_rows, row_in, weight_ih_ptr, weight_hh_ptr, units,
        H, G, BLOCK_B, BLOCK_G, BLOCK_K,
    )  # fmt: skip
    new_x, new_h = _gate(
        2, x_rows, h_rows, row_in, weight_ih_ptr, weight_hh_ptr, units,
        H, G, BLOCK_B, BLOCK_G, BLOCK_K,
    )  # fmt: skip
    update = _sigmoid(update_x + update_h)
    new = _tanh(new_x + _sigmoid(reset_x + reset_h) * new_h)
    inside = row_in[:, None] & unit_in[None, :]
    before = tl.load(h_rows[:, None] + units[None, :], mask=inside, other=0).to(
        tl.float32
    )
    out = out_ptr + rows.to(tl.int64)[:, None] * G + units[None, :]
    tl.store(out, (new + update * (before - new)).to(dtype), mask=inside)


@triton.jit
def _bottleneck_kernel(  # type: ignore[no-untyped-def]
    todo_ptr,
    projected_ptr,
    state_ptr,
    weight_ptr,
    out_ptr,
    num_reqs,
    projected_stride,
    state_stride,
    weight_stride,
    E: tl.constexpr,
    G: tl.constexpr,
    CONDITIONAL: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if _is_idle(todo_ptr, CONDITIONAL):
        return
    units = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    rows = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    unit_in = units < E
    row_in = rows < num_reqs
    dtype = out_ptr.dtype.element_ty
    h_rows = state_ptr + rows.to(tl.int64) * state_stride
    acc = _product(
        h_rows,
        row_in,
        weight_ptr + units * weight_stride,
        unit_in,
        G,
        BLOCK_B,
        BLOCK_E,
        BLOCK_K,
    )
    inside = row_in[:, None] & unit_in[None, :]
    z_rows = projected_ptr + rows.to(tl.int64) * projected_stride
    z = tl.load(z_rows[:, None] + units[None, :], mask=inside, other=0)
    summed = (z.to(tl.float32) + acc.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    out = out_ptr + rows.to(tl.int64)[:, None] * E + units[None, :]
    tl.store(out, (summed * _sigmoid(summed)).to(dtype), mask=inside)


@triton.jit
def _packed(scores, ids):  # type: ignore[no-untyped-def]
    """Scores, float32, and ids as whole numbers in the order of the scores."""
    # The two zeros are equal.
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered = tl.where(scores != scores, 0x7FFFFFFF, ordered)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def _value(packed):  # type: ignore[no-untyped-def]
    """The score that was packed, float32."""
    ordered = (packed >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _tiles_kernel(  # type: ignore[no-untyped-def]
    todo_ptr,
    base_ptr,
    inner_ptr,
    weight_ptr,
    out_ptr,
    num_reqs,
    num_tokens,
    base_stride,
    weight_stride,
    num_tiles,
    E: tl.constexpr,
    CORRECTED: tl.constexpr,
    CONDITIONAL: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    if _is_idle(todo_ptr, CONDITIONAL):
        return
    tile = tl.program_id(0)
    tokens = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    rows = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    token_in = tokens < num_tokens
    row_in = rows < num_reqs
    inside = row_in[:, None] & token_in[None, :]
    b_rows = base_ptr + rows.to(tl.int64) * base_stride
    base = tl.load(b_rows[:, None] + tokens[None, :], mask=inside, other=0)
    scores = base.to(tl.float32)
    if CORRECTED:
        acc = _product(
            inner_ptr + rows.to(tl.int64) * E,
            row_in,
            weight_ptr + tokens.to(tl.int64) * weight_stride,
            token_in,
            E,
            BLOCK_B,
            BLOCK_V,
            BLOCK_K,
        )
        dtype = base_ptr.dtype.element_ty
        scores = (scores + acc.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    packed = _packed(scores, tokens[None, :])
    nothing = tl.full((BLOCK_B, BLOCK_V), -0x7FFFFFFFFFFFFFFF, dtype=tl.int64)
    best = tl.max(tl.where(inside, packed, nothing), axis=1)
    out = out_ptr + rows.to(tl.int64) * num_tiles + tile
    tl.store(out, best, mask=row_in)


@triton.jit
def _likeliest_kernel(  # type: ignore[no-untyped-def]
    todo_ptr,
    tiles_ptr,
    values_ptr,
    ids_ptr,
    num_tiles,
    CONDITIONAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    if _is_idle(todo_ptr, CONDITIONAL):
        return
    row = tl.program_id(0)
    places = tl.arange(0, BLOCK_T)
    packed = tl.load(
        tiles_ptr + row.to(tl.int64) * num_tiles + places,
        mask=places < num_tiles,
        other=-0x7FFFFFFFFFFFFFFF,
    )
    best = tl.max(packed, axis=0)
    tl.store(values_ptr + row, _value(best))
    tl.store(ids_ptr + row, 0x7FFFFFFF - (best & 0x7FFFFFFF))


@triton.jit
def _of_pool_kernel(  # type: ignore[no-untyped-def]
    base_ptr,
    inner_ptr,
    weight_ptr,
    pool_ptr,
    values_ptr,
    ids_ptr,
    size,
    base_stride,
    E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dtype = base_ptr.dtype.element_ty
    nothing = tl.full((BLOCK_C,), -0x7FFFFFFFFFFFFFFF, dtype=tl.int64)
    best = nothing
    for start in range(0, size, BLOCK_C):
        places = start + tl.arange(0, BLOCK_C)
        inside = places < size
        acc = tl.zeros((BLOCK_C,), dtype=tl.float32)
        for first in range(0, E, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            c = tl.load(inner_ptr + row * E + k, mask=k < E, other=0).to(tl.float32)
            w = tl.load(
                weight_ptr + (row * size + places[:, None]) * E + k[None, :],
                mask=inside[:, None] & (k < E)[None, :],
                other=0,
            ).to(tl.float32)
            acc += tl.sum(w * c[None, :], axis=1)
        base = tl.load(base_ptr + row * base_stride + places, mask=inside, other=0)
        scores = base.to(tl.float32) + acc.to(dtype).to(tl.float32)
        scores = scores.to(dtype).to(tl.float32)
        ids = tl.load(pool_ptr + row * size + places, mask=inside, other=0)
        packed = _packed(scores, ids.to(tl.int32))
        best = tl.maximum(best, tl.where(inside, packed, nothing))
    winner = tl.max(best, axis=0)
    tl.store(values_ptr + row, _value(winner))
    tl.store(ids_ptr + row, 0x7FFFFFFF - (winner & 0x7FFFFFFF))


# --- Calls ---


def advance(
    tokens: torch.Tensor,
    state: torch.Tensor,
    table: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    todo: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``advance_twin``; the table and both weights contiguous.

    Args:
        todo: (1,) int32; where it is 0 nothing is done, and the result is not set. So
            for all of these.
    """
    num_reqs, gru = state.shape
    out = torch.empty((num_reqs, gru), dtype=state.dtype, device=state.device)
    grid = (triton.cdiv(gru, _BLOCK_G), triton.cdiv(num_reqs, _BLOCK_B))
    _advance_kernel[grid](
        tokens if todo is None else todo,
        tokens,
        state,
        table,
        weight_ih,
        weight_hh,
        out,
        num_reqs,
        state.stride(0),
        H=table.shape[1],
        G=gru,
        CONDITIONAL=todo is not None,
        BLOCK_B=_BLOCK_B,
        BLOCK_G=_BLOCK_G,
        BLOCK_K=_BLOCK_K,
    )
    return out


def bottleneck(
    projected: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    todo: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ``bottleneck_twin``; each contiguous in its last dimension."""
    num_reqs, width = projected.shape
    out = torch.empty((num_reqs, width), dtype=state.dtype, device=state.device)
    grid = (triton.cdiv(width, _BLOCK_E), triton.cdiv(num_reqs, _BLOCK_B))
    _bottleneck_kernel[grid](
        projected if todo is None else todo,
        projected,
        state,
        weight,
        out,
        num_reqs,
        projected.stride(0),
        state.stride(0),
        weight.stride(0),
        E=width,
        G=state.shape[1],
        CONDITIONAL=todo is not None,
        BLOCK_B=_BLOCK_B,
        BLOCK_E=_BLOCK_E,
        BLOCK_K=_BLOCK_K,
    )
    return out


def likeliest(
    base: torch.Tensor,
    inner: torch.Tensor | None,
    weight: torch.Tensor,
    todo: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``likeliest_twin``; base and weight contiguous in their last dimension,
    inner in both."""
    num_reqs, num_tokens = base.shape
    num_tiles = triton.cdiv(num_tokens, _BLOCK_V)
    device = base.device
    tiles = torch.empty((num_reqs, num_tiles), dtype=torch.int64, device=device)
    _tiles_kernel[(num_tiles, triton.cdiv(num_reqs, _BLOCK_B))](
        base if todo is None else todo,
        base,
        base if inner is None else inner,
        weight,
        tiles,
        num_reqs,
        num_tokens,
        base.stride(0),
        weight.stride(0),
        num_tiles,
        E=weight.shape[1],
        CORRECTED=inner is not None,
        CONDITIONAL=todo is not None,
        BLOCK_B=_BLOCK_B,
        BLOCK_V=_BLOCK_V,
        BLOCK_K=_BLOCK_E,
    )
    values = torch.empty(num_reqs, dtype=torch.float32, device=device)
    ids = torch.empty(num_reqs, dtype=torch.int64, device=device)
    _likeliest_kernel[(num_reqs,)](
        tiles if todo is None else todo,
        tiles,
        values,
        ids,
        num_tiles,
        CONDITIONAL=todo is not None,
        BLOCK_T=triton.next_power_of_2(num_tiles),
    )
    return values, ids


def likeliest_of_pool(
    base: torch.Tensor, inner: torch.Tensor, weight: torch.Tensor, pool: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``likeliest_of_pool_twin``; base contiguous in its last dimension, the rest
    in all."""
    num_reqs, size = base.shape
    values = torch.empty(num_reqs, dtype=torch.float32, device=base.device)
    ids = torch.empty(num_reqs, dtype=torch.int64, device=base.device)
    _of_pool_kernel[(num_reqs,)](
        base,
        inner,
        weight,
        pool,
        values,
        ids,
        size,
        base.stride(0),
        E=weight.shape[-1],
        BLOCK_C=_BLOCK_V,
        BLOCK_K=_BLOCK_E,
    )
    return values, ids
