"""What a forward knows of its documents: the one thing attention modules talk to.

Training passes `PackedAttention`; decoding passes a paged cache. The modules are the same.
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from archon.models.attention.backend import AttentionBackend
from archon.models.attention.documents import PackedDocuments, check_lengths
from archon.models.attention.prefix import SharedPrefixes
from archon.models.attention.registry import resolve_backend
from archon.models.attention.spec import AttentionSpec


class AttentionMeta(abc.ABC):
    """Says how the tokens of one forward attend to each other and to what was cached.

    Attributes:
        valid_mask: bool [T], the tokens that are no padding, on each rank those it holds between layers; None for all.
        gather_index: int64 [N], which of the T computed hidden states each of the N tokens asked for has; None where
            these are the computed ones.
    """

    valid_mask: Tensor | None = None
    gather_index: Tensor | None = None

    def begin(self, hidden: Tensor) -> None:  # noqa: B027 - a cache has nothing to prepare
        """Called once a forward with the first layer's input [T, dim]: device and compute dtype are known now."""

    @abc.abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Causal attention of one layer.

        Args:
            layer: index of the layer, for caches.
            q: [T, H, D]; k, v: [T, G, D] with H a multiple of G. Positions are already in q and k.
            spec: what the layer asks for; ConfigError for an option that is not computed.

        Returns:
            [T, H, D]
        """

    def document_lengths(self, positions: Tensor) -> Tensor | None:
        """Returns the length [T] of each token's document, for dynamic and LongRoPE frequencies; None if unknown."""
        return None


class PackedAttention(AttentionMeta):
    """Documents packed one after another.

    Args:
        cu_seqlens, max_seqlen, lengths: see `PackedDocuments`.
        attn_type: `auto` or a registered backend.
    """

    def __init__(
        self,
        cu_seqlens: Tensor,
        max_seqlen: int,
        attn_type: str = "auto",
        lengths: tuple[int, ...] | None = None,
    ) -> None:
        self.documents = PackedDocuments(cu_seqlens, max_seqlen, lengths)
        self.attn_type = attn_type
        self.backend: AttentionBackend | None = None

    @classmethod
    def of_lengths(cls, lengths: tuple[int, ...], device: torch.device, attn_type: str) -> PackedAttention:
        """Documents of these lengths, their boundaries on `device`."""
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        return cls(bounds, max(lengths), attn_type, lengths)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of each document, on the host."""
        return self.documents.lengths

    def begin(self, hidden: Tensor) -> None:
        self.backend = resolve_backend(self.attn_type, hidden.device, hidden.dtype)
        self.backend.prepare_packed(self.documents)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        if self.backend is None:
            self.begin(q)
        assert self.backend is not None
        self.backend.require(spec)
        return self.backend.packed(q, k, v, self.documents, spec)

    def document_lengths(self, positions: Tensor) -> Tensor:
        check_lengths(sum(self.lengths), positions.numel())
        lengths = self.documents.cu_seqlens.diff().to(torch.int64)
        return torch.repeat_interleave(lengths, lengths, output_size=positions.numel())


class PrefixAttention(AttentionMeta):
    """Documents of which each shared beginning stands once (see `archon.models.attention.prefix`).

    The model is given the `shared.rows` of the pack's tokens and returns hidden states of all of them.
    """

    def __init__(self, shared: SharedPrefixes, attn_type: str = "auto") -> None:
        self.shared, self.attn_type = shared, attn_type
        self.gather_index = shared.gather_index

    def begin(self, hidden: Tensor) -> None:
        check_lengths(self.shared.rows.numel(), hidden.shape[0])
        self.backend = resolve_backend(self.attn_type, hidden.device, hidden.dtype)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        self.backend.require(spec)
        return self.backend.prefixed(q, k, v, self.shared, spec)
