"""Cache of decoding sequences: a pool of pages with keys and values, and recurrent states.

A page has `page_size` tokens; a sequence has a list of pages, and sequences may share pages (Kwon et al. 2023,
arXiv:2309.06180). A page number stands for one page in every layer. Layers with equal rows form a group with one
tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from archon.models.attention.decode.cache import CacheSpec, PagedRows, RecurrentStates
from archon.models.attention.meta import RecurrentState
from archon.models.attention.spec import LayerIndex
from archon.models.cpu import operations
from archon.parallel.transfer import to_device_async


@dataclass(frozen=True)
class PagedTensors:
    """Pages of layers with equal rows, or of one layer without the first dimension.

    Attributes:
        rows: rows that each layer caches.
        keys: [n_layers, n_pages, heads, page_size, key_features].
        values: [n_layers, n_pages, heads, page_size, value_features], a view of `keys` if `rows.values_in_keys`.
    """

    rows: PagedRows
    keys: Tensor
    values: Tensor

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """Tensors with separate memory."""
        return (self.keys,) if self.rows.values_in_keys else (self.keys, self.values)

    def layer(self, index: int) -> PagedTensors:
        """Return the pages of one layer, as views."""
        return PagedTensors(self.rows, self.keys[index], self.values[index])


class StateCache:
    """`n_slots` states in every layer that caches `RecurrentStates`, for sequences or shared prompts.

    Further `scratch` slots follow them, see `PagedCache`.
    """

    def __init__(
        self, specs: Sequence[CacheSpec], n_slots: int, dtype: torch.dtype, device: torch.device | str, scratch: int = 0
    ) -> None:
        self._specs = {LayerIndex(layer): spec for layer, spec in enumerate(specs) if isinstance(spec, RecurrentStates)}
        self.n_slots = n_slots if self._specs else 0
        self._scratch = scratch
        self._dtypes, self._device = (dtype, torch.promote_types(dtype, torch.float32)), device
        self.clear()

    def clear(self) -> None:
        """Fill with zeros."""
        self.layers = {
            layer: tuple(
                torch.zeros(self.n_slots + self._scratch, *shape, dtype=dtype, device=self._device)
                for shape, dtype in zip((spec.inputs, spec.matrices), self._dtypes, strict=True)
            )
            for layer, spec in self._specs.items()
        }

    def read(self, layer: LayerIndex, slots: Tensor, fresh: Tensor | None) -> RecurrentState:
        """Return the states in `slots` int64 [B], zeros for new sequences (`fresh` bool [B])."""
        state = tuple(cache.index_select(0, slots) for cache in self.layers[layer])
        if fresh is None:
            return state
        return tuple(x.masked_fill(fresh.view(-1, *[1] * (x.dim() - 1)), 0) for x in state)

    def write(self, layer: LayerIndex, slots: Tensor, state: RecurrentState) -> None:
        """Store the states of distinct `slots` int64 [B]."""
        for cache, new in zip(self.layers[layer], state, strict=True):
            cache.index_copy_(0, slots, new.to(cache.dtype))

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) slots in every layer, reading all sources first."""
        source, target = to_device_async(torch.tensor(copies), torch.device(self._device)).unbind(1)
        for caches in self.layers.values():
            for cache in caches:
                cache.index_copy_(0, target, cache.index_select(0, source))


class PagedCache:
    """`n_pages` pages of `page_size` tokens in every layer that caches rows, and `n_states` recurrent states.

    Args:
        scratch: further pages and states that belong to no sequence: padding rows of a `DecodeStep` write to page
            `n_pages` and to state `states.n_slots`.

    Attributes:
        groups: one `PagedTensors` for the layers of each spec.
        states: recurrent states of layers without pages.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        n_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        n_states: int = 0,
        scratch: int = 0,
    ) -> None:
        self.states = StateCache(specs, n_states, dtype, device, scratch)
        self._scratch = scratch
        self.n_pages, self.page_size, self.device = n_pages, page_size, torch.device(device)
        self._dtype = dtype
        self._members: dict[PagedRows, list[LayerIndex]] = {}
        for layer, spec in enumerate(specs):
            if isinstance(spec, PagedRows):
                self._members.setdefault(spec, []).append(LayerIndex(layer))
        self.clear()

    def clear(self) -> None:
        """Fill with zeros: masked positions must be finite, since 0 · NaN is NaN."""
        self.states.clear()
        self.groups = tuple(self._zeros(rows, len(members)) for rows, members in self._members.items())
        self.layers = {
            layer: group.layer(index) for group in self.groups for index, layer in enumerate(self._members[group.rows])
        }

    def _zeros(self, rows: PagedRows, n_layers: int) -> PagedTensors:
        shape = n_layers, self.n_pages + self._scratch, rows.heads, self.page_size
        keys = _lazy_zeros((*shape, rows.key_features), self._dtype, self.device)
        if rows.values_in_keys:
            return PagedTensors(rows, keys, keys[..., : rows.value_features])
        return PagedTensors(rows, keys, _lazy_zeros((*shape, rows.value_features), self._dtype, self.device))

    def token_rows(self, pages: np.ndarray, offsets: np.ndarray) -> dict[int, Tensor]:
        """Return the cache rows [T · heads] of tokens, for each number of heads that layers have.

        They index a layer's cache as a matrix [n_pages · heads · page_size, features].
        """
        rows = {}
        for n_heads in {rows.heads for rows in self._members}:
            numbers = (pages[:, None] * n_heads + np.arange(n_heads)) * self.page_size + offsets[:, None]
            rows[n_heads] = to_device_async(torch.from_numpy(numbers.reshape(-1)), self.device)
        return rows

    def write(self, layer: LayerIndex, rows: dict[int, Tensor], *new: Tensor) -> None:
        """Store keys [T, heads, key_features], and values unless they are in the keys, at `token_rows`."""
        paged = self.layers[layer]
        for cache, x in zip(paged.stored, new, strict=True):
            memory, places = cache.view(-1, x.shape[-1]), rows[paged.rows.heads]
            if operations.can_use(memory, x):
                operations.store_rows(memory, places, x)
            else:
                memory.index_copy_(0, places, x.reshape(-1, x.shape[-1]))

    def read(self, layer: LayerIndex, pages: Tensor, length: int) -> list[Tensor]:
        """Return the first `length` keys [length, heads, key_features] of a sequence, and its values.

        Values are omitted if they are in the keys.
        """
        stored = self.layers[layer].stored
        return [cache.index_select(0, pages).transpose(1, 2).flatten(0, 1)[:length] for cache in stored]

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages in every layer."""
        source, target = (to_device_async(torch.tensor(pages), self.device) for pages in (sources, targets))
        for group in self.groups:
            for cache in group.stored:
                cache.index_copy_(1, target, cache.index_select(1, source))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU the system maps memory only for written pages, so an unused cache is free."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size, alignment = math.prod(shape) * dtype.itemsize, 64
    memory = np.zeros(size + alignment, dtype=np.uint8)  # torch.zeros would write all of them
    offset = -memory.ctypes.data % alignment
    return torch.from_numpy(memory[offset : offset + size]).view(dtype).view(shape)
