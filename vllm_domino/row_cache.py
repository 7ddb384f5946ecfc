# SPDX-License-Identifier: Apache-2.0
"""A KV cache in which a token's slot is its position in its own row.

Rows of a batch accept different numbers of drafts. Here that costs nothing: a rejected
token's slot is overwritten by the next token at that position, and until then the mask
hides it, as it hides every slot past the query's own position.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_FIRST_CAPACITY = 64


class _Layer(CacheLayerMixin):
    def __init__(self, cache: "RowCache") -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> None:
        self.keys, self.values = (
            states.new_zeros((*states.shape[:2], 0, states.shape[-1]))
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.keys.shape[2] < self.cache.capacity:
            self.keys, self.values = map(self._grown, (self.keys, self.values))
        slots = self.cache.slots[:, None, :, None]
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            store.scatter_(2, slots.expand_as(states), states)
        length = self.cache.length
        return self.keys[:, :, :length], self.values[:, :, :length]

    def _grown(self, store: torch.Tensor) -> torch.Tensor:
        shape = (*store.shape[:2], self.cache.capacity, store.shape[3])
        grown = store.new_zeros(shape)
        # All but the old last slot, which took the padding.
        grown[:, :, : max(0, store.shape[2] - 1)] = store[:, :, :-1]
        return grown

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.length, 0

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """Call ``place`` before each forward that writes to it.

    Attributes:
        slots: (B, T) where the tokens of the next forward go.
        length: Slots that a forward reads; those past a row's own are to be masked.
        capacity: Slots there are; the last takes what is padding.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[_Layer(self) for _ in range(num_layers)])
        self.slots = torch.zeros(0)
        self.length = 0
        self.capacity = 0

    def place(self, positions: torch.Tensor, longest: int) -> None:
        """Says where the next forward's tokens go.

        Args:
            positions: (B, T) each token's position in its row; negative for padding.
            longest: The largest of them plus one, over the rows.
        """
        self.length = max(self.length, longest)
        if self.length + 1 > self.capacity:
            self.capacity = max(2 * self.capacity, self.length + 1, _FIRST_CAPACITY)
        self.slots = positions.masked_fill(positions < 0, self.capacity - 1)


def causal_mask(
    positions: torch.Tensor, length: int, dtype: torch.dtype, additive: bool
) -> torch.Tensor:
    """(B, 1, T, length): a token sees the slots up to its own position.

    Args:
        positions: (B, T) of the queries; padding (negative) sees slot 0, so that no row
            of the softmax is empty.
        length: Slots there are to see.
        dtype: Of an additive mask.
        additive: 0 and the lowest number, as eager attention wants, not booleans.
    """
    slots = torch.arange(length, device=positions.device)
    visible = (slots <= positions.clamp(min=0)[..., None])[:, None]
    return as_additive(visible, dtype) if additive else visible


def as_additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return zeros.masked_fill(~visible, torch.finfo(dtype).min)
