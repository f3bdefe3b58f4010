"""What a forward knows of its documents: the one thing attention modules talk to.

Training passes `PackedAttention`; decoding passes a paged cache. The modules are the same.
"""

from __future__ import annotations

import abc
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from archon.models.attention.backend import AttnType, resolve_backend
from archon.models.attention.flash import flash_attention
from archon.models.attention.opaque import opaque_sdpa
from archon.models.attention.prefix import SharedPrefixes, prefix_attention
from archon.models.attention.sdpa import check_lengths, sdpa_attention
from archon.models.attention.varlen import varlen_attention


class Arrangement(NamedTuple):
    """The tokens that the layers compute, `rows` int64 [U] among the T given, how these attend, and `back` int64 [T]:
    where each of those given finds its hidden state afterwards."""

    meta: AttentionMeta
    rows: Tensor
    back: Tensor


class AttentionMeta(abc.ABC):
    """Says how the tokens of one forward attend to each other and to what was cached.

    `counted` marks the tokens [T] that are no padding, on each rank those it holds between layers; None for all.
    """

    counted: Tensor | None = None

    def begin(self, hidden: Tensor) -> None:  # noqa: B027 - a cache has nothing to prepare
        """Called once a forward with the first layer's input [T, dim]: device and compute dtype are known now."""

    def arrange(self) -> Arrangement | None:
        """Which tokens the layers compute, and in which order; None: all of them as they are."""
        return None

    @abc.abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float) -> Tensor:
        """Causal attention of one layer.

        Args:
            layer: index of the layer, for caches.
            q: [T, H, D]; k, v: [T, G, D] with H a multiple of G. Positions are already in q and k.
            window: each token sees itself and the window - 1 tokens before it in its document; None for all.
            scale: factor on the scores before the softmax.

        Returns:
            [T, H, D]
        """

    def document_lengths(self, positions: Tensor) -> Tensor | None:
        """Length [T] of each token's document, which dynamic and LongRoPE frequencies need; None where unknown."""
        return None


class PackedAttention(AttentionMeta):
    """Documents packed one after another.

    Args:
        cu_seqlens: int32 [B + 1], the documents' boundaries, from 0 to T.
        max_seqlen: length of the longest document.
        attn_type: `auto | sdpa | varlen | flash`.
        lengths: the documents' lengths when the host knows them, else taken from `cu_seqlens` when first needed.
        shared: what documents begin alike with, to be computed once; the backend `sdpa` makes use of it.
    """

    def __init__(
        self,
        cu_seqlens: Tensor,
        max_seqlen: int,
        attn_type: AttnType = "auto",
        lengths: tuple[int, ...] | None = None,
        shared: SharedPrefixes | None = None,
    ) -> None:
        self.shared = shared
        self.cu_seqlens, self.max_seqlen, self.attn_type = cu_seqlens, int(max_seqlen), attn_type
        self.backend: AttnType | None = None
        self._lengths: Tensor | None = None  # on the CPU, for compiled code
        if lengths is not None:
            self.lengths = lengths

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Each document's length on the host: one copy a forward, and none for kernels that need none."""
        return tuple(self.cu_seqlens.diff().tolist())

    def begin(self, hidden: Tensor) -> None:
        self.backend = resolve_backend(self.attn_type, hidden.device, hidden.dtype)
        self._lengths = torch.tensor(self.lengths) if self.backend == "sdpa" else None

    def arrange(self) -> Arrangement | None:
        if self.shared is not None and self.backend == "sdpa":
            return Arrangement(PrefixAttention(self.shared), self.shared.rows, self.shared.back)
        # Documents of one length side by side are one batch of the kernel: with the many short documents of
        # reinforcement, a handful of calls in place of hundreds.
        if self.backend != "sdpa" or sum(1 for _ in groupby(self.lengths)) <= 2 * len({*self.lengths}):
            return None
        lengths = torch.tensor(self.lengths)
        by_length = torch.argsort(lengths, stable=True)
        ends, sorted_lengths = lengths.cumsum(0), lengths[by_length]
        bounds = torch.nn.functional.pad(sorted_lengths.cumsum(0), (1, 0))
        shift = (ends - lengths)[by_length] - bounds[:-1]
        order = torch.arange(int(bounds[-1])) + torch.repeat_interleave(shift, sorted_lengths)
        device = self.cu_seqlens.device
        meta = PackedAttention(
            bounds.to(device, torch.int32), self.max_seqlen, self.attn_type, tuple(sorted_lengths.tolist())
        )
        meta.backend, meta._lengths = self.backend, sorted_lengths
        order = order.to(device)
        meta.counted = None if self.counted is None else self.counted[order]
        return Arrangement(meta, order, torch.argsort(order))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float) -> Tensor:
        if self.backend is None:
            self.begin(q)
        if self.backend == "varlen":
            return varlen_attention(q, k, v, self.cu_seqlens, self.max_seqlen, window=window, scale=scale)
        if self.backend == "flash":
            return flash_attention(q, k, v, self.cu_seqlens, self.max_seqlen, window=window, scale=scale)
        if torch.compiler.is_compiling():
            assert self._lengths is not None
            return opaque_sdpa(q, k, v, self._lengths, window=window, scale=scale)
        return sdpa_attention(q, k, v, self.lengths, window=window, scale=scale)

    def document_lengths(self, positions: Tensor) -> Tensor:
        check_lengths(sum(self.lengths), positions.numel())
        lengths = self.cu_seqlens.diff().to(torch.int64)
        return torch.repeat_interleave(lengths, lengths, output_size=positions.numel())


class PrefixAttention(AttentionMeta):
    """Documents of which each shared beginning stands once (see `archon.models.attention.prefix`)."""

    def __init__(self, shared: SharedPrefixes) -> None:
        self.shared = shared

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float) -> Tensor:
        return prefix_attention(q, k, v, self.shared, window=window, scale=scale)
