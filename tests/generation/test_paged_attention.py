"""Attention over pages against attention over the whole document, on scattered, shared and partly filled pages."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from archon.models.attention.decode.cache import PagedRows
from archon.models.attention.decode.paged import DecodeRows, PagedAttention, PrefillChunk
from archon.models.attention.decode.paged_cache import PagedCache
from archon.models.attention.packed.blockwise import batched_attention
from archon.models.attention.packed.sdpa import sdpa_attention
from archon.models.attention.spec import AttentionSpec, LayerIndex
from tests.tolerances import PAGED_FP64

HEADS, KV_HEADS, DIM = 6, 2, 8
ROWS = PagedRows(KV_HEADS, DIM, DIM)


def random_qkv(length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(length, heads, DIM, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS))


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=PAGED_FP64)


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("placement", ["compact", "reversed", "scattered"])
def test_a_decode_step_equals_the_last_row_of_packed_attention(
    placement: str, page_size: int, window: int | None
) -> None:
    lengths = [1, 3, 4, 17, 30, 16]
    counts = [-(-length // page_size) for length in lengths]
    n_pages = 8 * sum(counts)
    order = {
        "compact": np.arange(n_pages),
        "reversed": np.arange(n_pages)[::-1],
        "scattered": np.random.default_rng(0).permutation(n_pages),
    }[placement]
    starts = np.cumsum([0, *counts])
    tables = [order[a:b] for a, b in pairwise(starts)]
    cache = PagedCache([ROWS] * 2, n_pages, page_size, torch.float64, "cpu")
    documents = [random_qkv(length) for length in lengths]
    # Whatever is in unused places must not matter.
    cache.groups[0].keys.normal_()
    cache.groups[0].values.normal_()

    chunks = [PrefillChunk(0, n - 1, list(table), n) for n, table in zip(lengths, tables, strict=True) if n > 1]
    if chunks:
        meta = PagedAttention(cache, DecodeRows(np.zeros((0, 1), int), np.zeros(0, int)), chunks)
        q, k, v = (torch.cat([x[:-1] for x in column]) for column in zip(*documents, strict=True))
        meta.attend(LayerIndex(1), q, k, v, AttentionSpec(0.3, window))
    pages = np.zeros((len(lengths), max(counts)), dtype=np.int64)
    for row, table in zip(pages, tables, strict=True):
        row[: len(table)] = table
    meta = PagedAttention(cache, DecodeRows(pages, np.array(lengths)))
    assert meta.positions.tolist() == [length - 1 for length in lengths]
    q, k, v = (torch.stack([x[-1] for x in column]) for column in zip(*documents, strict=True))
    got = meta.attend(LayerIndex(1), q, k, v, AttentionSpec(0.3, window))
    for row, (document, length) in enumerate(zip(documents, lengths, strict=True)):
        whole = sdpa_attention(*document, (length,), AttentionSpec(0.3, window))
        assert_close(got[row], whole[-1])


@pytest.mark.parametrize("options", [{}, {"soft_cap": 1.5, "sinks": torch.linspace(-2, 2, HEADS).double()}], ids=len)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("count", [2, 8, 9, 19])
def test_sequences_that_share_pages(count: int, window: int | None, options: dict[str, Any]) -> None:
    """Sequences with the same first eight tokens, in pages all of them own, and two others next to them."""
    spec = AttentionSpec(1.0, window, **options)
    cache = PagedCache([ROWS], 90, 4, torch.float64, "cpu")
    prefix, lengths = random_qkv(8), [9 + i % 7 for i in range(count)] + [3, 8]
    tables = [[3, 7, 10 + 2 * i, 11 + 2 * i] for i in range(count)] + [[0, 0, 0, 0], [60, 1, 0, 0]]
    documents = [random_qkv(length) for length in lengths]
    documents[:count] = [
        tuple(torch.cat([shared, own[8:]]) for shared, own in zip(prefix, document, strict=True))
        for document in documents[:count]
    ]
    nothing = DecodeRows(np.zeros((0, 1), int), np.zeros(0, int))
    for length, table, document in zip(lengths, tables, documents, strict=True):
        meta = PagedAttention(cache, nothing, [PrefillChunk(0, length - 1, table, length)])
        meta.attend(LayerIndex(0), *(x[:-1] for x in document), spec)
    meta = PagedAttention(cache, DecodeRows(np.array(tables), np.array(lengths)))
    last = [torch.stack([x[-1] for x in column]) for column in zip(*documents, strict=True)]
    got = meta.attend(LayerIndex(0), *last, spec)
    for row, (document, length) in enumerate(zip(documents, lengths, strict=True)):
        assert_close(got[row], sdpa_attention(*document, (length,), spec)[-1])


@pytest.mark.parametrize("window", [None, 3, 100, 1000])
@pytest.mark.parametrize(("start", "length"), [(0, 5), (7, 1), (50, 300), (300, 129)])
def test_a_chunk_after_a_cached_prefix(start: int, length: int, window: int | None) -> None:
    q, k, v = random_qkv(start + length)
    whole = sdpa_attention(q, k, v, (start + length,), AttentionSpec(0.5, window))
    assert_close(batched_attention(q[None, start:], k[None], v[None], AttentionSpec(0.5, window))[0], whole[start:])


def test_decode_rows_and_chunks_of_both_kinds_in_one_forward() -> None:
    cache = PagedCache([ROWS], 40, 4, torch.float64, "cpu")
    lengths, starts = [9, 6, 10, 3], [8, 0, 7, 0]  # one decode row, a fresh prompt, the rest of one, a fresh one
    tables = [list(range(10 * i, 10 * i + 3)) for i in range(4)]
    documents = [random_qkv(length) for length in lengths]
    nothing = DecodeRows(np.zeros((0, 1), int), np.zeros(0, int))
    for document, start, table in zip(documents, starts, tables, strict=True):
        if start:
            meta = PagedAttention(cache, nothing, [PrefillChunk(0, start, table, start)])
            meta.attend(LayerIndex(0), *(x[:start] for x in document), AttentionSpec(1.0, 4))
    chunks = [PrefillChunk(starts[i], lengths[i] - starts[i], tables[i], lengths[i]) for i in (1, 2, 3)]
    meta = PagedAttention(cache, DecodeRows(np.array(tables[:1]), np.array([9])), chunks)
    q, k, v = (
        torch.cat([x[start:] for x, start in zip(column, starts, strict=True)])
        for column in zip(*documents, strict=True)
    )
    got = meta.attend(LayerIndex(0), q, k, v, AttentionSpec(1.0, 4))
    wanted = [
        sdpa_attention(*document, (length,), AttentionSpec(1.0, 4))[start:]
        for document, length, start in zip(documents, lengths, starts, strict=True)
    ]
    assert_close(got, torch.cat(wanted))
    assert meta.positions.tolist() == [8, *range(6), 7, 8, 9, *range(3)]
    assert meta.document_lengths(meta.positions).tolist() == [9, *[6] * 6, *[10] * 3, *[3] * 3]

    keys = cache.groups[0].keys.clone()
    padded = PagedAttention(cache, DecodeRows(np.array(tables[:1]), np.array([9])), chunks, padded_length=16)
    got = padded.attend(
        LayerIndex(0), *(torch.cat([x, torch.ones_like(x[:3])]) for x in (q, k, v)), AttentionSpec(1.0, 4)
    )
    assert_close(got[:13], torch.cat(wanted))
    assert not got[13:].any()
    assert torch.equal(cache.groups[0].keys, keys), "padding is never cached"
    assert padded.positions.tolist() == [*meta.positions.tolist(), 0, 0, 0]
    assert padded.document_lengths(padded.positions).tolist()[13:] == [1, 1, 1]


def anonymous_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_a_cache_takes_memory_only_where_it_is_used() -> None:
    before = anonymous_bytes()
    cache = PagedCache([PagedRows(4, 64, 64)] * 4, 4096, 16, torch.float32, "cpu")
    assert cache.groups[0].keys.nbytes + cache.groups[0].values.nbytes == 2**29
    cache.copy_pages([0], [1])
    assert anonymous_bytes() - before < 2**29 / 16
    assert cache.groups[0].keys.data_ptr() % 64 == 0
    cache.groups[0].keys[0, 5] = torch.nan
    cache.clear()
    assert not cache.groups[0].keys[0, 5].any()
    assert anonymous_bytes() - before < 2**29 / 16


def test_keys_and_values_are_never_gathered_when_pages_lie_together() -> None:
    """The decode step of sequences whose pages fill a range reads the cache in place."""
    cache = PagedCache([ROWS], 64, 4, torch.float64, "cpu")
    meta = PagedAttention(cache, DecodeRows(np.arange(32).reshape(16, 2), np.full(16, 8)))
    storage = cache.groups[0].keys.untyped_storage().data_ptr(), cache.groups[0].values.untyped_storage().data_ptr()
    read: list[int] = []
    matmul = torch.matmul

    def watched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        read.append(b.untyped_storage().data_ptr())
        return matmul(a, b)

    torch.matmul = watched
    try:
        meta.attend(LayerIndex(0), *random_qkv(16), AttentionSpec(1.0, None))
    finally:
        torch.matmul = matmul
    assert tuple(read) == storage


def test_layers_that_cache_other_rows_share_page_numbers() -> None:
    """Two groups of layers with other heads and widths in one cache, and a group whose values are parts of its keys."""
    wide, narrow, latent = PagedRows(3, 8, 8), PagedRows(1, 4, 4), PagedRows(1, 12, 8, values_in_keys=True)
    cache = PagedCache([wide, narrow, latent, wide], 12, 4, torch.float64, "cpu")
    assert [group.keys.shape[0] for group in cache.groups] == [2, 1, 1]
    assert [spec.token_features for spec in (wide, narrow, latent)] == [48, 8, 12]
    assert sum(tensor.numel() for group in cache.groups for tensor in group.stored) == 12 * 4 * (2 * 48 + 8 + 12)
    length, table = 11, [7, 2, 9]
    nothing = DecodeRows(np.zeros((0, 1), int), np.zeros(0, int))
    first = PagedAttention(cache, nothing, [PrefillChunk(0, length - 1, table, length)])
    last = PagedAttention(cache, DecodeRows(np.array([table]), np.array([length])))
    for index, spec in enumerate([wide, narrow, latent, wide]):
        layer = LayerIndex(index)
        q, k = (torch.randn(length, heads, spec.key_features, dtype=torch.float64) for heads in (6, spec.heads))
        v = k[..., : spec.value_features] if spec.values_in_keys else torch.randn_like(k)
        cached = [k] if spec.values_in_keys else [k, v]
        first.cache.write(layer, first._rows, *(x[:-1] for x in cached))
        last.cache.write(layer, last._rows, *(x[-1:] for x in cached))
        got = last._attend_pages(layer, q[-1:], AttentionSpec(0.4))
        p = torch.softmax(0.4 * torch.einsum("hd,tgd->hgt", q[-1], k), dim=-1)
        groups = torch.arange(6) // (6 // spec.heads)
        assert_close(got[0], torch.einsum("ht,thd->hd", p[torch.arange(6), groups], v[:, groups]))
    before = [group.keys[:, 7].clone() for group in cache.groups]
    cache.copy_pages([7], [0])
    assert all(torch.equal(group.keys[:, 0], old) for group, old in zip(cache.groups, before, strict=True))
    cache.clear()
    assert not any(tensor.any() for group in cache.groups for tensor in group.stored)


def test_pages_are_copied_in_every_group_of_layers() -> None:
    wide, narrow, latent = PagedRows(3, 8, 8), PagedRows(1, 4, 4), PagedRows(1, 12, 8, values_in_keys=True)
    cache = PagedCache([wide, narrow, latent, wide], 6, 4, torch.float64, "cpu")
    stored = [tensor for group in cache.groups for tensor in group.stored]
    assert len(stored) == 5
    for tensor in stored:
        tensor.normal_()
    before = [tensor.clone() for tensor in stored]
    cache.copy_pages([1, 4], [5, 0])
    for tensor, old in zip(stored, before, strict=True):
        assert torch.equal(tensor[:, [5, 0]], old[:, [1, 4]])
        assert torch.equal(tensor[:, 1:5], old[:, 1:5])
