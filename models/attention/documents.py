"""What attention backends are told of the documents of one forward: a pack's, or those of one rank's queries."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from archon.parallel.context import SequenceShare


def check_lengths(documents: int, tokens: int) -> None:
    """Raises ValueError unless the documents' tokens are those given."""
    if documents != tokens:
        raise ValueError(f"documents of {documents} tokens in all, but {tokens} tokens were given; check cu_seqlens")


class PackedDocuments:
    """B documents of T tokens in all, one after another.

    Args:
        cu_seqlens: int32 [B + 1], their boundaries, from 0 to T.
        max_seqlen: length of the longest.
        lengths: theirs where the host knows them, else taken from `cu_seqlens` when first needed.
    """

    def __init__(self, cu_seqlens: Tensor, max_seqlen: int, lengths: tuple[int, ...] | None = None) -> None:
        self.cu_seqlens, self.max_seqlen = cu_seqlens, int(max_seqlen)
        if lengths is not None:
            self.lengths = lengths

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Of each document, on the host: one copy a forward, and none for kernels that need none."""
        return tuple(self.cu_seqlens.diff().tolist())

    @cached_property
    def length_tensor(self) -> Tensor:
        """`lengths` as int64 [B] on the CPU, for compiled code, which takes a tuple for constants."""
        return torch.tensor(self.lengths)


class GatheredKeys:
    """Keys and values of a pack's T tokens, gathered from the ranks that hold them, and this rank's queries.

    A rank's tokens are chunks of documents; a chunk's queries meet the keys of its document up to its own end.

    Attributes:
        queries: how many tokens each of this rank's C chunks has.
        keys: (first token in the pack, how many) of the keys that each chunk meets; its queries are the last of them.
    """

    def __init__(self, share: SequenceShare) -> None:
        starts, own = torch.tensor([0, *share.plan.lengths]).cumsum(0).tolist(), share.plan.chunks[share.cp.rank]
        self.queries = tuple(stop - start for _, start, stop in own)
        self.keys = tuple((starts[document], stop) for document, _, stop in own)
        self.max_queries, self.max_keys = max(self.queries), max(stop for _, stop in self.keys)
        self._share = share

    def of_pack(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [T, G, D] in the order of the pack, of kv [T, 2 G, D] in the order of the ranks."""
        k, v = kv.index_select(0, self._share.inverse).chunk(2, dim=1)
        return k, v

    def of_chunks(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [K, G, D] of the keys of every chunk, one chunk after the other, of kv as in `of_pack`."""
        k, v = kv.index_select(0, self.rows_of_chunks).chunk(2, dim=1)
        return k, v

    @cached_property
    def rows_of_chunks(self) -> Tensor:
        """int64 [K]: where the keys of every chunk stand in the order of the ranks."""
        spans = torch.cat([torch.arange(first, first + length) for first, length in self.keys])
        return self._share.inverse.index_select(0, spans.to(self._share.inverse.device))

    @cached_property
    def cu_queries(self) -> Tensor:
        """int32 [C + 1], the boundaries of the chunks among this rank's queries."""
        return self._bounds(self.queries)

    @cached_property
    def cu_keys(self) -> Tensor:
        """int32 [C + 1], the boundaries of the chunks among the keys that `of_chunks` gives."""
        return self._bounds(tuple(length for _, length in self.keys))

    def _bounds(self, lengths: tuple[int, ...]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(self._share.inverse.device, torch.int32)
