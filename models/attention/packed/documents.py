"""Documents of one forward: packed documents, and chunks of one rank's queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from archon.models.cpu.tree_kernel import Routes
from archon.parallel.context import SequenceShard
from archon.parallel.transfer import to_device_async


def check_lengths(documents: int, tokens: int) -> None:
    """Raise ValueError unless the documents have `tokens` tokens in total."""
    if documents != tokens:
        raise ValueError(f"the documents have {documents} tokens, but the input has {tokens}; check cu_seqlens")


def cu_seqlens_from_lengths(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return the boundaries int32 [B + 1] of consecutive documents of these lengths, on `device`."""
    return to_device_async(torch.tensor([0, *lengths]).cumsum(0).int(), device)


class PackedDocuments:
    """B consecutive documents with T tokens in total.

    Args:
        cu_seqlens: int32 [B + 1], the documents' boundaries, from 0 to T.
        max_seqlen: length of the longest document.
        lengths: the documents' lengths, if the host knows them.
    """

    def __init__(self, cu_seqlens: Tensor, max_seqlen: int, lengths: tuple[int, ...] | None = None) -> None:
        self.cu_seqlens, self.max_seqlen = cu_seqlens, int(max_seqlen)
        self._spaced: dict[int, SpacedRows] = {}
        self._runs: dict[int, list[tuple[tuple[int, ...], Routes | None]]] = {}
        if lengths is not None:
            self.lengths = lengths

    @property
    def has_host_lengths(self) -> bool:
        """Whether the host already has `lengths`."""
        return "lengths" in self.__dict__ or self.cu_seqlens.device.type == "cpu"

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Document lengths on the host, copied from the device on first use; some kernels never need them."""
        return tuple(self.cu_seqlens.diff().tolist())

    @cached_property
    def length_tensor(self) -> Tensor:
        """`lengths` and a 0 as int64 [B + 1] on the CPU, for compiled code, which treats a tuple as constants.

        Without the empty document at the end, torch.compile would compile again for the size 1 of a single document.
        """
        return torch.tensor([*self.lengths, 0])

    @cached_property
    def cu_seqlens_int64(self) -> Tensor:
        """`cu_seqlens` as int64; one tensor for all layers, because kernels cache results by tensor identity."""
        return self.cu_seqlens.long()

    @cached_property
    def cu_seqlens_cpu(self) -> Tensor:
        """`cu_seqlens` as int64 on the CPU, for kernels that would otherwise copy them from the device."""
        return torch.tensor([0, *self.lengths]).cumsum(0)

    @cached_property
    def chunks(self) -> DocumentChunks:
        """The documents in chunks of equal size, for a scan."""
        return DocumentChunks.from_lengths(self.lengths, self.cu_seqlens.device)

    def runs(self, short: int) -> list[tuple[tuple[int, ...], Routes | None]]:
        """Group adjacent documents into runs of short ones (at most `short` tokens) and runs of longer ones.

        Returns:
            (lengths, routes) of each run; routes are None for longer documents. Cached for each `short`.
        """
        if short not in self._runs:
            runs = [
                (tuple(run), is_short) for is_short, run in groupby(self.lengths, key=lambda length: length <= short)
            ]
            self._runs[short] = [(run, Routes.from_documents(run) if is_short else None) for run, is_short in runs]
        return self._runs[short]

    def spaced(self, gap: int) -> SpacedRows:
        """Return the rows of the documents with `gap` rows before each; cached for each gap."""
        if gap not in self._spaced:
            self._spaced[gap] = SpacedRows.from_lengths(self.lengths, gap, self.cu_seqlens.device)
        return self._spaced[gap]


@dataclass(frozen=True)
class SpacedRows:
    """Consecutive documents, each with `gap` rows before it.

    Attributes:
        length: number of rows, T + B * gap.
        rows: int64 [T], the row of each token.
        history_rows: int64 [B * gap], the rows before each document.
        last_rows: int64 [B * gap], the last `gap` rows of each document and the gap before it.
    """

    length: int
    rows: Tensor
    history_rows: Tensor
    last_rows: Tensor

    @classmethod
    def from_lengths(cls, lengths: tuple[int, ...], gap: int, device: torch.device) -> SpacedRows:
        """Return the rows of documents of these lengths."""
        counts = torch.tensor(lengths)
        ends = (counts + gap).cumsum(0)
        gaps = torch.arange(gap)
        document = torch.repeat_interleave(torch.arange(len(lengths)), counts)
        rows = torch.arange(sum(lengths)) + (document + 1) * gap
        history, last = ((first.unsqueeze(1) + gaps).flatten() for first in (ends - counts - gap, ends - gap))
        on_device = (to_device_async(x, device) for x in (rows, history, last))
        return cls(sum(lengths) + len(lengths) * gap, *on_device)


MAX_CHUNK = 64


@dataclass(frozen=True)
class DocumentChunks:
    """Documents in N chunks of `size` tokens; the last chunk of a document is padded.

    The first chunks of all documents come first, then the second chunks, and so on. Longer documents come before
    shorter ones.

    Attributes:
        positions: int64 [T], the position of each token among the N * size.
        steps: number of documents with a first chunk, a second one, and so on.
        order: int64 [B], the document of each first chunk.
        rank: int64 [B], the first chunk of each document.
    """

    size: int
    positions: Tensor
    steps: tuple[int, ...]
    order: Tensor
    rank: Tensor

    @classmethod
    def from_lengths(cls, lengths: tuple[int, ...], device: torch.device) -> DocumentChunks:
        """Return the chunks of documents of these lengths: 64 tokens, or fewer if the longest is shorter."""
        size = min(MAX_CHUNK, 1 << (max(lengths) - 1).bit_length())
        counts = (torch.tensor(lengths) + size - 1) // size
        order = counts.argsort(descending=True, stable=True)
        rank = order.argsort()
        steps = [int((counts > step).sum()) for step in range(int(counts.max()))]
        firsts = torch.tensor([0, *steps]).cumsum(0)
        spans = [torch.arange(length) for length in lengths]
        # Step i computes chunk i of all documents that have one; a document's place in the step is its rank.
        positions = torch.cat(
            [(firsts[span // size] + rank[document]) * size + span % size for document, span in enumerate(spans)]
        )
        positions, order, rank = (to_device_async(x, device) for x in (positions, order, rank))
        return cls(size, positions, tuple(steps), order, rank)

    def cut(self, x: Tensor) -> Tensor:
        """Return x [T, H, ...] as [N, H, size, ...], with zeros for padding."""
        padded = x.new_zeros(sum(self.steps) * self.size, *x.shape[1:]).index_copy(0, self.positions, x)
        return padded.unflatten(0, (-1, self.size)).transpose(1, 2)


class GatheredKeys:
    """Splits keys and values gathered from all ranks, for this rank's queries.

    A rank's tokens are chunks of documents; a chunk's queries attend to the keys of its document up to the chunk's end.

    Attributes:
        query_lengths: tokens of each of this rank's C chunks.
        key_spans: (first token in the pack, count) of each chunk's visible keys; its queries are the last of them.
    """

    def __init__(self, shard: SequenceShard) -> None:
        starts, chunks = torch.tensor([0, *shard.plan.lengths]).cumsum(0).tolist(), shard.plan.chunks[shard.cp.rank]
        self.query_lengths = tuple(stop - start for _, start, stop in chunks)
        self.key_spans = tuple((starts[document], stop) for document, _, stop in chunks)
        self.max_queries, self.max_keys = max(self.query_lengths), max(count for _, count in self.key_spans)
        self._shard = shard

    def in_pack_order(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return k and v [T, G, D] in pack order, from kv [T, 2 G, D] in rank order."""
        k, v = kv.index_select(0, self._shard.inverse).chunk(2, dim=1)
        return k, v

    def by_chunk(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return k and v [K, G, D] of every chunk's keys, chunk after chunk, from kv in rank order."""
        k, v = kv.index_select(0, self.chunk_rows).chunk(2, dim=1)
        return k, v

    @cached_property
    def chunk_rows(self) -> Tensor:
        """int64 [K], rank-order indices of every chunk's keys."""
        spans = torch.cat([torch.arange(first, first + count) for first, count in self.key_spans])
        return self._shard.inverse.index_select(0, to_device_async(spans, self._shard.inverse.device))

    @cached_property
    def cu_seqlens(self) -> tuple[Tensor, Tensor]:
        """int32 [C + 1] each: boundaries of the chunks' queries, and of their keys as in `by_chunk`."""
        counts = [count for _, count in self.key_spans]
        bounds = torch.tensor([[0, *self.query_lengths], [0, *counts]]).cumsum(1)
        queries, keys = to_device_async(bounds.int(), self._shard.inverse.device)
        return queries, keys
