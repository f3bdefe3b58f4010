"""The compiled attention of decoding steps against plain softmax in float64, and what happens without a compiler."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from archon.models.attention.decode.cache import PagedRows
from archon.models.attention.decode.paged import DecodeRows, PagedAttention
from archon.models.attention.decode.paged_cache import PagedCache, PagedTensors
from archon.models.attention.spec import AttentionSpec, LayerIndex
from archon.models.cpu import decode_kernel, library
from tests.models.naive_attention import attend as plain_attention

LENGTHS = np.array([1, 3, 4, 17, 30, 16, 129])
HEADS, SCALE, FLOAT32_ERROR = 6, 0.3, 2e-6


@pytest.fixture(autouse=True)
def _fresh_kernel() -> Iterator[None]:
    library.kernels.cache_clear()
    yield
    library.kernels.cache_clear()


def filled(rows: PagedRows, page_size: int) -> tuple[PagedTensors, np.ndarray, Tensor]:
    """Return one layer's random pages, those of each sequence in random order, and queries in float32."""
    torch.manual_seed(0)
    counts = -(-LENGTHS // page_size)
    cache = PagedCache([rows], 2 * int(counts.sum()), page_size, torch.float32, "cpu")
    for stored in cache.layers[LayerIndex(0)].stored:
        stored.normal_()
    order = np.random.default_rng(0).permutation(cache.n_pages)
    pages = np.zeros((len(LENGTHS), counts.max()), dtype=np.int64)
    for row, (count, last) in enumerate(zip(counts, counts.cumsum(), strict=True)):
        pages[row, :count] = order[last - count : last]
    return cache.layers[LayerIndex(0)], pages, torch.randn(len(LENGTHS), HEADS, rows.key_features)


def expected(q: Tensor, paged: PagedTensors, pages: np.ndarray, spec: AttentionSpec) -> Tensor:
    """Return attention in float64, sequence by sequence."""
    outs = []
    for row, length in enumerate(LENGTHS):
        keys, values = (
            x[torch.from_numpy(pages[row])].transpose(1, 2).flatten(0, 1)[:length].double()
            for x in (paged.keys, paged.values)
        )
        outs.append(plain_attention(q[row : row + 1].double(), keys, values, spec)[0])
    return torch.stack(outs)


@pytest.mark.parametrize("soft_cap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("page_size", [1, 4, 32, 256])
@pytest.mark.parametrize(
    "rows",
    [PagedRows(2, 64, 64), PagedRows(6, 20, 12), PagedRows(1, 24, 16, values_in_keys=True)],
    ids=["grouped", "odd", "latents"],
)
def test_attention_to_pages(
    rows: PagedRows, page_size: int, window: int | None, with_sinks: bool, soft_cap: float | None
) -> None:
    paged, pages, q = filled(rows, page_size)
    sinks = torch.linspace(-2, 2, HEADS) if with_sinks else None
    spec = AttentionSpec(SCALE, window, soft_cap, sinks)
    assert decode_kernel.can_use(q, paged)
    got = decode_kernel.attend(q, paged, pages, LENGTHS, spec)
    wide = AttentionSpec(SCALE, window, soft_cap, None if sinks is None else sinks.double())
    torch.testing.assert_close(got.double(), expected(q, paged, pages, wide), rtol=0, atol=FLOAT32_ERROR)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    paged, pages, q = filled(PagedRows(2, 64, 64), 4)
    q *= 100
    got = decode_kernel.attend(q, paged, pages, LENGTHS, AttentionSpec(SCALE))
    for row, length in enumerate(LENGTHS):
        keys, values = (
            x[torch.from_numpy(pages[row])].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(3, 0).double()
            for x in (paged.keys, paged.values)
        )
        scores = torch.einsum("hd,hld->hl", q[row].double(), keys) * SCALE
        wanted = torch.einsum("hl,hld->hd", scores.softmax(-1), values)
        # Scores of some thousands are 1e-4 off in float32, and so are weights.
        torch.testing.assert_close(got[row].double(), wanted, rtol=0, atol=1e-3)
    assert scores.abs().max() > 500


def test_a_row_depends_on_no_other_row_and_on_no_number_of_threads() -> None:
    paged, pages, q = filled(PagedRows(2, 64, 64), 4)
    spec, threads = AttentionSpec(SCALE), torch.get_num_threads()
    together = decode_kernel.attend(q, paged, pages, LENGTHS, spec)
    for row in range(len(LENGTHS)):
        one = slice(row, row + 1)
        assert torch.equal(decode_kernel.attend(q[one], paged, pages[one], LENGTHS[one], spec), together[one])
    try:
        torch.set_num_threads(3)
        assert torch.equal(decode_kernel.attend(q, paged, pages, LENGTHS, spec), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so_in_its_own_row(bad: float) -> None:
    paged, pages, q = filled(PagedRows(2, 64, 64), 4)
    q[3, 0, 5] = bad
    got = decode_kernel.attend(q, paged, pages, LENGTHS, AttentionSpec(SCALE)).isfinite()
    assert not got[3, 0].any()
    got[3, 0] = True
    assert got.all()


def test_scores_that_are_all_below_any_number_and_sinks_that_are_none_give_no_number() -> None:
    paged, pages, q = filled(PagedRows(2, 64, 64), 4)
    paged.keys.abs_()
    q[2] = -torch.inf
    assert decode_kernel.attend(q, paged, pages, LENGTHS, AttentionSpec(SCALE))[2].isnan().all()
    sinks = torch.zeros(HEADS)
    sinks[1] = torch.nan
    q[2] = 0
    got = decode_kernel.attend(q, paged, pages, LENGTHS, AttentionSpec(SCALE, sinks=sinks))
    assert got[:, 1].isnan().all()
    assert got[:, 0].isfinite().all()


def test_where_it_applies() -> None:
    paged, _, q = filled(PagedRows(2, 64, 64), 4)
    assert decode_kernel.can_use(q, paged)
    assert not decode_kernel.can_use(q.double(), paged)
    assert not decode_kernel.can_use(q.clone().requires_grad_(), paged)
    assert not decode_kernel.can_use(q.to("meta"), paged)
    wide = PagedTensors(paged.rows, paged.keys.double(), paged.values.double())
    assert not decode_kernel.can_use(q, wide)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert not decode_kernel.can_use(q[:1], paged)  # two tasks, which would leave a thread without one
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "an 'unfinished name"])
def test_without_a_compiler_products_of_pages_give_the_same(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def decoded() -> Tensor:
        torch.manual_seed(1)
        cache = PagedCache([PagedRows(2, 64, 64)], 40, 4, torch.float32, "cpu")
        cache.groups[0].keys.normal_()
        cache.groups[0].values.normal_()
        rows = DecodeRows(np.arange(40).reshape(4, 10), np.array([40, 1, 7, 13]))
        q, k, v = (torch.randn(4, heads, 64) for heads in (HEADS, 2, 2))
        return PagedAttention(cache, rows).attend(LayerIndex(0), q, k, v, AttentionSpec(SCALE))

    compiled = decoded()
    library.kernels.cache_clear()
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO):
        plain = decoded()
    assert library.kernels() is None
    assert "without their compiled kernels" in caplog.text
    torch.testing.assert_close(plain, compiled, rtol=0, atol=FLOAT32_ERROR)
