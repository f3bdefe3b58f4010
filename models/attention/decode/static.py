"""Attention of a decode step with tensors at fixed addresses, as CUDA graphs need."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from torch import Tensor

from archon.models.attention.decode.page_batches import PageBatch
from archon.models.attention.decode.paged import CachingAttention, attend_decode_rows
from archon.models.attention.decode.paged_cache import PagedCache
from archon.models.attention.latent import LatentKeys
from archon.models.attention.meta import Scan
from archon.models.attention.packed.documents import PackedDocuments
from archon.models.attention.spec import AttentionSpec, LayerIndex


class StaticPagedAttention(CachingAttention):
    """Attention of one new token in each of B rows. On CUDA it copies nothing between host and device.

    Args:
        cache: the pool; new keys and values are written to it before attention.
        pages: int64 [B, width], the pages of each row's sequence, in order.
        lengths: int64 [B], tokens of each row's sequence, including the new one; at least 1.
        states: int64 [B], the slot of each row's state.
        documents: B documents of one token, built once for all forwards of B rows.
    """

    def __init__(
        self, cache: PagedCache, pages: Tensor, lengths: Tensor, states: Tensor, documents: PackedDocuments
    ) -> None:
        self.cache, self.pages, self.lengths = cache, pages, lengths.contiguous()
        self.states, self.documents = states, documents
        self._batches: dict[int | None, list[PageBatch]] = {}

    @cached_property
    def _rows(self) -> dict[int, Tensor]:
        """`PagedCache.token_rows` of the new tokens, on a CPU."""
        size, last = self.cache.page_size, self.lengths.numpy() - 1
        return self.cache.token_rows(self.pages.numpy()[np.arange(len(last)), last // size], last % size)

    @cached_property
    def _fresh(self) -> Tensor:
        return self.lengths == 1

    def attend(self, layer: LayerIndex, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """See `AttentionMeta.attend`."""
        return self._attend_pages(layer, q, spec, k, v)

    def attend_latent(self, layer: LayerIndex, q: Tensor, keys: LatentKeys, spec: AttentionSpec) -> Tensor:
        """Attend to the cached latents themselves."""
        latents = self._attend_pages(layer, keys.absorb(q, self.lora_mapping), spec, keys.rows)
        return keys.expand_values(latents, self.lora_mapping)

    def run_recurrence(
        self, layer: LayerIndex, rows: Sequence[Tensor], weights: Sequence[Tensor], scan: Scan
    ) -> Tensor:
        """See `AttentionMeta.run_recurrence`."""
        before = self.cache.states.read(layer, self.states, self._fresh)
        out, after = scan(rows, weights, self.documents, before)
        self.cache.states.write(layer, self.states, after)
        return out

    def _attend_pages(self, layer: LayerIndex, q: Tensor, spec: AttentionSpec, *new: Tensor) -> Tensor:
        """Cache the `new` keys and values of the tokens.

        Returns attention [B, H, V] of one query [B, H, K] per row to its pages.
        """
        attend = self._attend_by_kernels if q.is_cuda else self._attend_on_cpu
        return attend(layer, q, spec, *self.finite_rows(new))

    def _attend_on_cpu(self, layer: LayerIndex, q: Tensor, spec: AttentionSpec, *new: Tensor) -> Tensor:
        self.cache.write(layer, self._rows, *new)
        pages, lengths = self.pages.numpy(), self.lengths.numpy()
        return attend_decode_rows(self.cache, layer, q, pages, lengths, spec, self._batches)

    def _attend_by_kernels(self, layer: LayerIndex, q: Tensor, spec: AttentionSpec, *new: Tensor) -> Tensor:
        from archon.models.cuda.paged_attention import paged_attention, store_tokens

        paged = self.cache.layers[layer]
        store_tokens(paged, self.pages, self.lengths, *new)
        return paged_attention(q, paged, self.pages, self.lengths, spec)
