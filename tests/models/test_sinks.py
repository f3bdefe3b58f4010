"""Attention sinks and soft-capped scores, in every way that attention is computed, against their definition."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from archon.models.attention.decode.cache import PagedRows
from archon.models.attention.decode.paged import DecodeRows, PagedAttention, PrefillChunk
from archon.models.attention.decode.paged_cache import PagedCache
from archon.models.attention.packed.documents import GatheredKeys, PackedDocuments
from archon.models.attention.packed.sdpa import ScaledDotProductAttention, sdpa_attention
from archon.models.attention.prefix.plan import prefix_attention, shared_prefixes
from archon.models.attention.sinks import KernelWithLse, add_sinks, attention_with_sinks, sinks_grad
from archon.models.attention.spec import AttentionSpec, LayerIndex
from archon.parallel.comm import Group
from archon.parallel.context import SequenceShard, zigzag_plan
from archon.tools.check.oracle import relative_error
from tests.models.naive_attention import NaiveAttention
from tests.models.test_prefix import answers
from tests.tolerances import FORMULA_FP32, FORMULA_FP64, PAGED_FP64

SCALE = 0.4
OPTIONS = {"sinks": (True, None), "soft cap": (False, 1.5), "both": (True, 1.5)}
options = pytest.mark.parametrize(("with_sinks", "soft_cap"), OPTIONS.values(), ids=OPTIONS)


def draw(total: int, heads: int = 4, kv_heads: int = 2, features: int = 8) -> list[Tensor]:
    """Queries, keys and values; large enough that scores reach the soft cap."""
    return [
        torch.randn(total, n, features, dtype=torch.float64, requires_grad=True) for n in (heads, kv_heads, kv_heads)
    ]


def draw_sinks(with_sinks: bool, heads: int = 4) -> Tensor | None:
    return torch.randn(heads, dtype=torch.float64, requires_grad=True) if with_sinks else None


def documents_of(lengths: list[int] | tuple[int, ...]) -> PackedDocuments:
    return PackedDocuments(torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32), max(lengths))


def check(actual: Tensor, expected: Tensor, inputs: list[Tensor | None]) -> None:
    """The results, and the gradients of all inputs, are equal; with a window of 1 and no sinks scores do not matter."""
    assert relative_error(actual, expected) <= FORMULA_FP64
    given = [x for x in inputs if x is not None]
    weight = torch.randn_like(expected)
    for ours, theirs in zip(*(torch.autograd.grad(x, given, weight) for x in (actual, expected)), strict=True):
        if theirs.abs().max() > FORMULA_FP64:
            assert relative_error(ours, theirs) <= FORMULA_FP64
        else:
            assert ours.abs().max() <= FORMULA_FP64


@options
@pytest.mark.parametrize("lengths", [[150, 150, 17, 1, 1, 64, 65], [5, 5], [1]], ids=str)
@pytest.mark.parametrize("window", [None, 1, 3, 64])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_packed_documents(
    lengths: list[int], window: int | None, kv_heads: int, with_sinks: bool, soft_cap: float | None
) -> None:
    qkv, sinks = draw(sum(lengths), kv_heads=kv_heads), draw_sinks(with_sinks)
    spec = AttentionSpec(SCALE, window, soft_cap, sinks)
    expected = NaiveAttention().attend_packed(*qkv, documents_of(lengths), spec)
    check(sdpa_attention(*qkv, tuple(lengths), spec), expected, [*qkv, sinks])


@pytest.mark.parametrize("window", [None, 100, 5000])
def test_a_document_of_large_blocks(window: int | None) -> None:
    qkv, sinks = draw(1100), draw_sinks(True)
    spec = AttentionSpec(SCALE, window, 1.5, sinks)
    check(
        sdpa_attention(*qkv, (1100,), spec),
        NaiveAttention().attend_packed(*qkv, documents_of([1100]), spec),
        [*qkv, sinks],
    )


@options
@pytest.mark.parametrize("window", [None, 2])
def test_gradients_are_those_of_differences(with_sinks: bool, soft_cap: float | None, window: int | None) -> None:
    qkv, sinks = draw(9, features=2), draw_sinks(with_sinks)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        return sdpa_attention(q, k, v, (5, 1, 3), AttentionSpec(SCALE, window, soft_cap, sinks))

    assert torch.autograd.gradcheck(attend, (*qkv, sinks))


@options
@pytest.mark.parametrize("window", [None, 2])
def test_the_operator_of_compiled_code(with_sinks: bool, soft_cap: float | None, window: int | None) -> None:
    lengths = [7, 7, 20, 1]
    qkv, sinks = draw(sum(lengths)), draw_sinks(with_sinks)
    expected = sdpa_attention(*qkv, tuple(lengths), AttentionSpec(SCALE, window, soft_cap, sinks))
    arguments = (sinks, torch.tensor(lengths), window or 0, SCALE, soft_cap or 0.0)
    check(torch.ops.archon.packed_sdpa(*qkv, *arguments), expected, [*qkv, sinks])
    torch.library.opcheck(torch.ops.archon.packed_sdpa.default, (*qkv, *arguments))


def test_a_sink_is_a_key_without_a_value() -> None:
    """One more key of the same score for all queries, whose value is zero."""
    q, k, v = draw(7)
    seen = sdpa_attention(q, k, v, (7,), AttentionSpec(SCALE, sinks=torch.zeros(4, dtype=torch.float64)))
    zero = torch.zeros_like(k[:1])
    q, k, v = torch.cat((q[:1], q)), torch.cat((zero, k)), torch.cat((zero, v))
    assert relative_error(sdpa_attention(q, k, v, (8,), AttentionSpec(SCALE))[1:], seen) <= FORMULA_FP64


def test_extreme_sinks_are_no_overflow() -> None:
    q, k, v = (x.detach().float() for x in draw(150))
    plain = sdpa_attention(q, k, v, (150,), AttentionSpec(SCALE))
    for sink, expected in ((-1e4, plain), (1e4, torch.zeros_like(plain))):
        out = sdpa_attention(q, k, v, (150,), AttentionSpec(SCALE, sinks=torch.full((4,), sink)))
        torch.testing.assert_close(out, expected)


@options
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("longest", [6, 150])
def test_documents_with_shared_prefixes(
    longest: int, window: int | None, with_sinks: bool, soft_cap: float | None
) -> None:
    tokens, lengths = answers([6, 40, 6], per_prompt=4, longest=longest, seed=1)
    shared = shared_prefixes(tokens, lengths)
    assert shared is not None and (shared.trees if longest == 6 else shared.runs)
    qkv, sinks = draw(len(shared.rows)), draw_sinks(with_sinks)
    spec = AttentionSpec(SCALE, window, soft_cap, sinks)
    whole = (x.index_select(0, shared.gather_index) for x in qkv)
    expected = NaiveAttention().attend_packed(*whole, documents_of(lengths), spec)
    check(prefix_attention(*qkv, shared, spec).index_select(0, shared.gather_index), expected, [*qkv, sinks])


@options
@pytest.mark.parametrize("window", [None, 5])
def test_keys_gathered_from_other_ranks(window: int | None, with_sinks: bool, soft_cap: float | None) -> None:
    """Every rank's queries, in turn; the gradient of a sink is the sum over the ranks."""
    ranks = 2
    plan = zigzag_plan((13, 1, 40, 200), ranks, 1)
    lengths = plan.lengths  # with one document more, of padding
    shares = [
        SequenceShard(plan, Group("cp", ranks, rank), Group("tp", 1, 0), torch.device("cpu")) for rank in range(ranks)
    ]
    qkv, sinks = draw(sum(lengths)), draw_sinks(with_sinks)
    spec = AttentionSpec(SCALE, window, soft_cap, sinks)
    order = torch.cat([share.index for share in shares])
    kv = torch.cat(qkv[1:], dim=1).index_select(0, order)
    backend = ScaledDotProductAttention()
    outs = [backend.attend_gathered(qkv[0].index_select(0, s.index), kv, GatheredKeys(s), spec) for s in shares]
    actual = torch.cat(outs).index_select(0, order.argsort())
    check(actual, NaiveAttention().attend_packed(*qkv, documents_of(lengths), spec), [*qkv, sinks])


@options
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("page_size", [1, 4, 64])
@torch.no_grad()
def test_decoding_from_pages(page_size: int, window: int | None, with_sinks: bool, soft_cap: float | None) -> None:
    """Prompts in one piece, then the rest of each prompt but its last token, then the last tokens of all, in one
    forward; pages of 64 hold a whole sequence each."""
    lengths, cut = [2, 4, 17, 30, 16], [1, 2, 9, 1, 7]
    counts = [-(-length // page_size) for length in lengths]
    tables = [list(range(a, b)) for a, b in pairwise(np.cumsum([0, *counts]))]
    cache = PagedCache([PagedRows(2, 8, 8)], sum(counts), page_size, torch.float64, "cpu")
    documents = [draw(length) for length in lengths]
    sinks = draw_sinks(with_sinks)
    spec, nothing = AttentionSpec(SCALE, window, soft_cap, sinks), DecodeRows(np.zeros((0, 1), int), np.zeros(0, int))
    expected = [NaiveAttention().attend_packed(*x, documents_of([len(x[0])]), spec) for x in documents]

    def step(bounds: list[tuple[int, int]]) -> None:
        chunks = [PrefillChunk(a, b - a, t, n) for (a, b), t, n in zip(bounds, tables, lengths, strict=True) if b > a]
        spans = list(zip(documents, bounds, strict=True))
        qkv = [torch.cat([document[i][a:b] for document, (a, b) in spans]) for i in range(3)]
        wanted = torch.cat([out[a:b] for out, (a, b) in zip(expected, bounds, strict=True)])
        got = PagedAttention(cache, nothing, chunks).attend(LayerIndex(0), *qkv, spec)
        torch.testing.assert_close(got, wanted, rtol=0, atol=PAGED_FP64)

    step([(0, first) for first in cut])
    step([(first, length - 1) for first, length in zip(cut, lengths, strict=True)])
    pages = np.zeros((len(lengths), max(counts)), dtype=np.int64)
    for row, table in zip(pages, tables, strict=True):
        row[: len(table)] = table
    last = [torch.stack([document[i][-1] for document in documents]) for i in range(3)]
    got = PagedAttention(cache, DecodeRows(pages, np.array(lengths))).attend(LayerIndex(0), *last, spec)
    torch.testing.assert_close(got, torch.stack([out[-1] for out in expected]), rtol=0, atol=PAGED_FP64)


class CpuKernel(KernelWithLse):
    """torch's own FlashAttention for CPUs, of one document; its backward is given whatever out and log-sum-exp."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)), is_causal=True, scale=SCALE
        )
        return out[0].transpose(0, 1), lse.view(q.shape[1], -1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = [x.transpose(0, 1).unsqueeze(0) for x in (grad, q, k, v, out)]
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, lse.unsqueeze(0), 0.0, True, scale=SCALE
        )
        return tuple(x[0].transpose(0, 1) for x in found)


@pytest.mark.parametrize("length", [1, 20, 100])
def test_a_kernels_own_backward_gives_the_gradients_with_sinks(length: int) -> None:
    qkv, sinks = draw(length, kv_heads=4), torch.randn(4, dtype=torch.float64, requires_grad=True)
    expected = NaiveAttention().attend_packed(*qkv, documents_of([length]), AttentionSpec(SCALE, sinks=sinks))
    check(attention_with_sinks(*qkv, sinks, CpuKernel()), expected, [*qkv, sinks])


def test_the_log_sum_exp_stays_wide_under_narrow_sinks() -> None:
    """bfloat16 sinks around a float32 log-sum-exp: out, and the gradient of the sinks, are rounded once at most."""
    lse, sinks = 3 * torch.randn(4, 50), torch.randn(4).bfloat16()
    exact = (lse.double().exp() + sinks.double().exp().unsqueeze(1)).log()
    found = add_sinks(lse, sinks)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=FORMULA_FP32, atol=FORMULA_FP32)
    grad, out = torch.randn(2, 50, 4, 8).unbind(0)
    slope = sinks_grad(grad, out, found, sinks)
    sums = (grad.double() * out.double()).sum(-1).t()
    expected = -((sinks.double().unsqueeze(1) - exact).exp() * sums).sum(1)
    assert slope.dtype == torch.bfloat16
    torch.testing.assert_close(slope.double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("way", ["kernel", "packed", "blocks", "pages", "single page"])
def test_narrow_sinks_round_no_score(way: str) -> None:
    """bfloat16 sinks next to float64 queries and keys give the float64 result of the same numbers."""
    length = 300 if way == "blocks" else 40
    qkv, sinks = draw(length, kv_heads=4), torch.randn(4).bfloat16()
    spec = AttentionSpec(SCALE, sinks=sinks)
    with torch.no_grad():
        if way == "kernel":
            found = attention_with_sinks(*qkv, sinks, CpuKernel())
        elif "page" in way:
            size = 4 if way == "pages" else 64
            cache = PagedCache([PagedRows(4, 8, 8)], 10, size, torch.float64, "cpu")
            nothing = DecodeRows(np.zeros((0, 1), int), np.zeros(0, int))
            table, first = list(range(-(-length // size))), [x[:-1] for x in qkv]
            chunk = PrefillChunk(0, length - 1, table, length)
            rest = PagedAttention(cache, nothing, [chunk]).attend(LayerIndex(0), *first, spec)
            decode = DecodeRows(np.array([table]), np.array([length]))
            last = PagedAttention(cache, decode).attend(LayerIndex(0), *(x[-1:] for x in qkv), spec)
            found = torch.cat((rest, last))
        else:
            found = sdpa_attention(*qkv, (length,), spec)
        exact = replace(spec, sinks=sinks.double())
        expected = NaiveAttention().attend_packed(*qkv, documents_of([length]), exact)
    assert found.dtype == torch.float64
    assert relative_error(found, expected) <= FORMULA_FP64


@pytest.mark.parametrize("way", ["packed", "prefixes", "gathered"])
def test_gradients_of_narrow_sinks_are_rounded_once(way: str) -> None:
    """Block of a long document and several documents add to the gradient of a sink before it is rounded."""
    tokens, lengths = torch.arange(400), (300, 40, 7, 53)
    if way == "prefixes":
        tokens, lengths = answers([6, 40, 6], per_prompt=4, longest=150, seed=1)
    qkv, sinks = draw(len(tokens), kv_heads=4), torch.randn(4).bfloat16().requires_grad_()
    exact = sinks.detach().double().requires_grad_()
    weight = torch.randn(len(tokens), 4, 8, dtype=torch.float64)
    spec = AttentionSpec(SCALE, sinks=sinks)
    if way == "packed":
        out = sdpa_attention(*qkv, tuple(lengths), spec)
    elif way == "gathered":
        plan = zigzag_plan(lengths, 1, 1)
        share = SequenceShard(plan, Group("cp", 1, 0), Group("tp", 1, 0), torch.device("cpu"))
        assert torch.equal(share.index, torch.arange(len(tokens)))
        out = ScaledDotProductAttention().attend_gathered(qkv[0], torch.cat(qkv[1:], dim=1), GatheredKeys(share), spec)
    else:
        shared = shared_prefixes(tokens, lengths)
        assert shared is not None
        rows = [x.detach()[: len(shared.rows)].requires_grad_() for x in qkv]
        out = prefix_attention(*rows, shared, spec).index_select(0, shared.gather_index)
        qkv = [x.index_select(0, shared.gather_index) for x in rows]
    expected = NaiveAttention().attend_packed(*qkv, documents_of(lengths), AttentionSpec(SCALE, sinks=exact))
    (found,), (gradient,) = torch.autograd.grad(out, [sinks], weight), torch.autograd.grad(expected, [exact], weight)
    assert torch.equal(found, gradient.bfloat16())


def test_a_log_sum_exp_of_another_shape_is_noticed() -> None:
    class Transposed(CpuKernel):
        def forward(self, *qkv: Tensor) -> tuple[Tensor, Tensor]:
            out, lse = super().forward(*qkv)
            return out, lse.t()

    with pytest.raises(AssertionError, match=r"log-sum-exp of shape \(20, 4\)"):
        attention_with_sinks(*draw(20, kv_heads=4), torch.zeros(4), Transposed())


def test_a_spec_without_sinks_is_an_ordinary_one() -> None:
    spec: Any = AttentionSpec(SCALE, 3, None, torch.zeros(4))
    assert replace(spec, sinks=None) == AttentionSpec(SCALE, 3)
