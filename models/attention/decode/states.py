"""Recurrent states of decoding sequences, for layers with a cache of fixed size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from archon.models.attention.decode.cache import CacheSpec, RecurrentStates
from archon.models.attention.meta import RecurrentState
from archon.parallel.transfer import to_device_async


class StateCache:
    """`n_slots` states in every layer that caches `RecurrentStates`, for sequences or shared prompts.

    Args:
        specs: cache spec of each layer.
        n_slots: number of states.
        dtype: dtype of the model.
        device: device of the states.
    """

    def __init__(
        self, specs: Sequence[CacheSpec], n_slots: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._specs = {layer: spec for layer, spec in enumerate(specs) if isinstance(spec, RecurrentStates)}
        self.n_slots = n_slots if self._specs else 0
        self._dtypes, self._device = (dtype, torch.promote_types(dtype, torch.float32)), device
        self.clear()

    def clear(self) -> None:
        """Fill with zeros."""
        self.layers = {
            layer: tuple(
                torch.zeros(self.n_slots, *shape, dtype=dtype, device=self._device)
                for shape, dtype in zip((spec.inputs, spec.matrices), self._dtypes, strict=True)
            )
            for layer, spec in self._specs.items()
        }

    def read(self, layer: int, slots: Tensor, fresh: Tensor | None) -> RecurrentState:
        """Return the states in `slots` int64 [B], zeros for new sequences (`fresh` bool [B])."""
        state = tuple(cache.index_select(0, slots) for cache in self.layers[layer])
        if fresh is None:
            return state
        return tuple(x.masked_fill(fresh.view(-1, *[1] * (x.dim() - 1)), 0) for x in state)

    def write(self, layer: int, slots: Tensor, state: RecurrentState) -> None:
        """Store the states of distinct `slots` int64 [B]."""
        for cache, new in zip(self.layers[layer], state, strict=True):
            cache.index_copy_(0, slots, new.to(cache.dtype))

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) slots in every layer, reading all sources first."""
        source, target = to_device_async(torch.tensor(copies), torch.device(self._device)).unbind(1)
        for caches in self.layers.values():
            for cache in caches:
                cache.index_copy_(0, target, cache.index_select(0, source))
