"""The paged attention kernel against a plain float64 softmax over the same pages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from archon.models.attention.decode.cache import PagedRows
from archon.models.attention.decode.paged_cache import PagedCache
from archon.models.attention.spec import AttentionSpec, LayerIndex
from archon.models.cuda.paged_attention import paged_attention, store_tokens
from tests.models.cuda.conftest import INTERPRETED

# float32 sums in another order.
TOLERANCE = 3e-6
HALF_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LENGTHS = (1, 5, 64, 65, 150)


class Pages:
    """Sequences of these lengths in scattered pages of one layer; unused places hold 7."""

    def __init__(
        self, rows: PagedRows, page_size: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        counts = [-(-length // page_size) for length in LENGTHS]
        cache = PagedCache([rows], sum(counts) + 3, page_size, dtype, device)
        self.paged = cache.layers[LayerIndex(0)]
        for stored in self.paged.stored:
            stored.fill_(7)
        order = np.random.default_rng(0).permutation(cache.n_pages)
        self.pages = torch.full((len(LENGTHS), max(counts) + 1), cache.n_pages - 1, device=device)
        self.lengths = torch.tensor(LENGTHS, device=device)
        self.keys = [torch.randn(length, rows.heads, rows.key_features).to(device, dtype) for length in LENGTHS]
        self.values = [torch.randn(length, rows.heads, rows.value_features).to(device, dtype) for length in LENGTHS]
        if rows.values_in_keys:
            self.values = [keys[..., : rows.value_features] for keys in self.keys]
        for row, (count, length) in enumerate(zip(counts, LENGTHS, strict=True)):
            start = sum(counts[:row])
            self.pages[row, :count] = torch.from_numpy(order[start : start + count])
            for token in range(length):
                page = self.pages[row, token // page_size]
                self.paged.keys[page, :, token % page_size] = self.keys[row][token]
                if not rows.values_in_keys:
                    self.paged.values[page, :, token % page_size] = self.values[row][token]

    def reference(self, q: Tensor, spec: AttentionSpec) -> Tensor:
        """Attention of q [B, H, K] in float64: softmax(cap(q k / s)) v over the last `window` tokens and the sink."""
        outs = []
        for query, keys, values in zip(q.double(), self.keys, self.values, strict=True):
            repeats = query.shape[0] // keys.shape[1]
            keys, values = (
                x[-(spec.window or len(x)) :].double().repeat_interleave(repeats, 1) for x in (keys, values)
            )
            scores = torch.einsum("hk,thk->ht", query, keys) * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            sinks = torch.full_like(scores[:, :1], -torch.inf) if spec.sinks is None else spec.sinks.double()[:, None]
            weights = torch.cat((scores, sinks), 1).softmax(1)[:, :-1]
            outs.append(torch.einsum("ht,thv->hv", weights, values))
        return torch.stack(outs)


@pytest.mark.parametrize("n_splits", [1, 3])
@pytest.mark.parametrize(
    ("window", "soft_cap", "sinks"), [(None, None, False), (33, None, True), (1, 1.5, False), (None, 1.5, True)]
)
def test_options(device: torch.device, n_splits: int, window: int | None, soft_cap: float | None, sinks: bool) -> None:
    pages = Pages(PagedRows(2, 16, 16), 16, device)
    q = torch.randn(len(LENGTHS), 6, 16).to(device)
    spec = AttentionSpec(0.3, window, soft_cap, torch.linspace(-3, 4, 6).to(device) if sinks else None)
    out = paged_attention(q, pages.paged, pages.pages, pages.lengths, spec, n_splits)
    torch.testing.assert_close(out.double(), pages.reference(q, spec), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("page_size", [1, 7])
@pytest.mark.parametrize(
    ("heads", "rows"),
    [
        (3, PagedRows(3, 8, 8)),
        (8, PagedRows(2, 24, 40)),
        (20, PagedRows(1, 40, 32, values_in_keys=True)),
        (4, PagedRows(1, 14, 10, values_in_keys=True)),
    ],
    ids=["one query head per key head", "widths without a power of two", "latents", "narrow latents"],
)
def test_shapes(device: torch.device, page_size: int, heads: int, rows: PagedRows) -> None:
    pages = Pages(rows, page_size, device)
    q = torch.randn(len(LENGTHS), heads, rows.key_features).to(device)
    spec = AttentionSpec(0.2)
    for n_splits in (1, 2):
        out = paged_attention(q, pages.paged, pages.pages, pages.lengths, spec, n_splits)
        torch.testing.assert_close(out.double(), pages.reference(q, spec), rtol=0, atol=TOLERANCE)


# The interpreter multiplies the bits of bfloat16 numbers.
@pytest.mark.parametrize("dtype", [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16])
def test_half_precision(device: torch.device, dtype: torch.dtype) -> None:
    pages = Pages(PagedRows(2, 32, 32), 16, device, dtype)
    q = torch.randn(len(LENGTHS), 4, 32).to(device, dtype)
    spec = AttentionSpec(0.18, 100)
    out = paged_attention(q, pages.paged, pages.pages, pages.lengths, spec)
    assert out.dtype == dtype
    tolerance = HALF_TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), pages.reference(q, spec), rtol=0, atol=tolerance)


@pytest.mark.parametrize("values_in_keys", [False, True])
def test_a_token_is_stored_in_its_page_alone(device: torch.device, values_in_keys: bool) -> None:
    """Keys and values are views of a wider product, as of joint projections."""
    rows = PagedRows(2, 24, 20, values_in_keys=values_in_keys)
    pages = Pages(rows, 16, device)
    stored = pages.paged.stored
    joint = torch.randn(len(LENGTHS), 2, 24 + 20).to(device)
    new = joint.split((24, 20), dim=-1)[: len(stored)]
    expected = [x.clone() for x in stored]
    for row, length in enumerate(LENGTHS):
        page, place = pages.pages[row, (length - 1) // 16], (length - 1) % 16
        for cache, x in zip(expected, new, strict=True):
            cache[page, :, place] = x[row]
    store_tokens(pages.paged, pages.pages, pages.lengths, *new)
    for got, wanted in zip(stored, expected, strict=True):
        assert torch.equal(got, wanted)


def test_more_splits_than_blocks_add_nothing(device: torch.device) -> None:
    pages = Pages(PagedRows(1, 16, 16), 16, device)
    q = torch.randn(len(LENGTHS), 2, 16).to(device)
    for spec in (AttentionSpec(0.3), replace(AttentionSpec(0.3), sinks=torch.tensor([2.0, -1.0], device=device))):
        out = paged_attention(q, pages.paged, pages.pages, pages.lengths, spec, 9)
        torch.testing.assert_close(out.double(), pages.reference(q, spec), rtol=0, atol=TOLERANCE)
