"""Attention backends against the definition: per document, causal, windowed, with grouped heads."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from archon.models.attention.meta import PackedAttention
from archon.models.attention.packed import blockwise, sdpa
from archon.models.attention.packed import varlen as varlen_backend
from archon.models.attention.packed.blockwise import batched_attention
from archon.models.attention.registry import available_backends, candidates, register_attention_backend, resolve_backend
from archon.models.attention.spec import AttentionSpec, LayerIndex
from archon.models.cpu import tree_kernel
from archon.models.layers import attention as attention_layer
from archon.models.layers.norm import NormSpec
from archon.models.layers.rope import Rotation
from archon.schema.errors import ConfigError
from archon.tools.check.oracle import relative_error
from tests.tolerances import FLASH_BF16, FORMULA_FP32, FORMULA_FP64

SCALE = 0.4
REAL_VARLEN, REAL_VARLEN_BACKWARD = varlen.varlen_attn, varlen._varlen_attn_backward
PACKS = [[300, 300, 17, 1, 64, 65, 200], [1100], [5, 5], [1]]


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    left: int,
    scale: float = SCALE,
    causal: bool = True,
    soft_cap: float = 0.0,
) -> Tensor:
    """softmax(q k' scale) v within each document; token i sees i - left .. i, or all before it where left < 0."""
    return with_lse(q, k, v, lengths, left, scale, causal, soft_cap)[0]


def by_document(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], left: int, scale: float, causal: bool, soft_cap: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each document's scores [H, S, S], -inf where a key is hidden, and values [S, H, D], as `definition`."""
    for q_, k_, v_ in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        k_, v_ = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k_, v_))
        i, j = torch.arange(len(q_)).unsqueeze(1), torch.arange(len(q_))
        seen = ((j <= i) | (not causal)) & ((j >= i - left) | (left < 0))
        scores = torch.einsum("qhd,khd->hqk", q_, k_) * scale
        scores = soft_cap * (scores / soft_cap).tanh() if soft_cap else scores
        yield scores.masked_fill(~seen, -torch.inf), v_


def with_lse(*qkv_and_options: Any) -> tuple[Tensor, Tensor]:
    """See `definition`; and the log-sum-exp [H, T] of the scores."""
    documents = list(by_document(*qkv_and_options))
    outs = [torch.einsum("hqk,khd->qhd", scores.softmax(-1), v) for scores, v in documents]
    return torch.cat(outs), torch.cat([scores.logsumexp(-1) for scores, _ in documents], dim=1)


@torch.enable_grad()
def kernel_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lengths: list[int], *options: Any
) -> tuple[Tensor, ...]:
    """FlashAttention's backward: p = e^(score - lse), and the gradient of a score is p times what its value receives
    less the row's sum of grad * out."""
    q, k, v = given = [x.detach().float().requires_grad_() for x in (q, k, v)]
    grads, row_sums = grad.float().split(lengths), (grad.float() * out).sum(-1).t().split(lengths, dim=1)
    loss = torch.zeros(())
    documents = by_document(q, k, v, lengths, *options)
    for (scores, v_), lse_, grad_, sums in zip(documents, lse.split(lengths, dim=1), grads, row_sums, strict=True):
        p = (scores - lse_.unsqueeze(-1)).exp().detach()
        of_scores = p * (torch.einsum("qhd,khd->hqk", grad_, v_) - sums.unsqueeze(-1)).detach()
        loss = loss + (of_scores * scores.masked_fill(p == 0, 0)).sum()
        loss = loss + (grad_ * torch.einsum("hqk,khd->qhd", p, v_)).sum()
    return torch.autograd.grad(loss, given)


def draw(total: int, dtype: torch.dtype = torch.float64, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    return [torch.randn(total, h, 8, dtype=dtype, requires_grad=True) for h in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize("lengths", PACKS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 2, 63, 64, 65, 299, 300, 5000])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_sdpa_and_its_gradients_equal_the_definition(lengths: list[int], window: int | None, kv_heads: int) -> None:
    qkv = draw(sum(lengths), kv_heads=kv_heads)
    expected = definition(*qkv, lengths, -1 if window is None else window - 1)
    actual = sdpa.sdpa_attention(*qkv, tuple(lengths), AttentionSpec(SCALE, window))
    assert relative_error(actual, expected) <= FORMULA_FP64

    weight = torch.randn_like(expected)
    gradients = zip(*(torch.autograd.grad(x, qkv, weight) for x in (actual, expected)), strict=True)
    for ours, theirs in gradients:
        if theirs.abs().max() > FORMULA_FP64:  # with a window of 1 scores do not matter
            assert relative_error(ours, theirs) <= FORMULA_FP64
        else:
            assert ours.abs().max() <= FORMULA_FP64


@pytest.mark.parametrize("threads", [1, 2])
def test_long_documents(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Which torch's kernel takes as they are, and their last queries, for which it has no mask."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    lengths = [2048, 2048, 3]
    qkv = draw(sum(lengths), heads=2, kv_heads=1)
    expected = definition(*qkv, lengths, -1)
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, qkv, weight)
    last = [x[:2048].unsqueeze(0) for x in qkv]
    of_last = batched_attention(last[0][:, -5:], *last[1:], AttentionSpec(SCALE)).squeeze(0)
    assert relative_error(of_last, expected[2043:2048]) <= FORMULA_FP64
    monkeypatch.setattr(blockwise, "blockwise_attention", None)
    actual = sdpa.sdpa_attention(*qkv, tuple(lengths), AttentionSpec(SCALE))
    assert relative_error(actual, expected) <= FORMULA_FP64
    for ours, theirs in zip(torch.autograd.grad(actual, qkv, weight), wanted, strict=True):
        assert relative_error(ours, theirs) <= FORMULA_FP64


@pytest.mark.parametrize("lengths", [[24, 3, 3, 1, 24, 7], [2, 0, 5, 0], [1], [25, 2, 9, 40, 40, 0, 3], [30]], ids=str)
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("threads", [1, 2])
def test_packs_of_short_documents_in_float32(
    lengths: list[int], window: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adjacent ones are one call of a C function, as near to float64 as a call for each length is."""
    drawn, weight = draw(sum(lengths)), torch.randn(sum(lengths), 4, 8)
    spec = AttentionSpec(SCALE, window)

    def results(dtype: torch.dtype, attend: Callable[..., Tensor], *documents: Any) -> list[Tensor]:
        qkv = [x.detach().to(dtype).requires_grad_() for x in drawn]
        out = attend(*qkv, *documents)
        return [out, *torch.autograd.grad(out, qkv, weight.to(dtype))]

    meta = PackedAttention.from_lengths(tuple(lengths), torch.device("cpu"), "sdpa")
    exact = results(torch.float64, definition, [n for n in lengths if n], -1 if window is None else window - 1)
    called = list[int]()
    attend = tree_kernel.attend
    monkeypatch.setattr(tree_kernel, "attend", lambda *args: (called.append(1), attend(*args))[1])
    torch.set_num_threads(threads)
    try:
        ours = results(torch.float32, functools.partial(meta.attend, 0), spec)
    finally:
        torch.set_num_threads(1)
    runs = [is_short for is_short, _ in groupby(lengths, key=lambda length: length <= sdpa.SHORT)]
    assert len(called) == sum(runs)
    others = results(torch.float32, sdpa.sdpa_attention, tuple(lengths), spec)
    for own, other, wanted in zip(ours, others, exact, strict=True):
        limit = max(2 * (other - wanted).abs().max(), FORMULA_FP32 * wanted.abs().max(), FORMULA_FP32)
        assert (own - wanted).abs().max() <= limit


def test_a_short_document_is_the_same_alone_and_next_to_a_long_one() -> None:
    qkv = [x.detach().float() for x in draw(50)]
    both, alone = (PackedAttention.from_lengths(n, torch.device("cpu"), "sdpa") for n in ((40, 10), (10,)))
    spec = AttentionSpec(SCALE)
    assert both.attend(LayerIndex(0), *qkv, spec)[40:].equal(alone.attend(LayerIndex(0), *[x[40:] for x in qkv], spec))


@pytest.mark.parametrize("options", [{"causal": False}, {"soft_cap": 2.0}, {"sinks": torch.zeros(4)}], ids=str)
def test_what_the_c_function_for_short_documents_cannot_do(options: dict[str, Any]) -> None:
    spec = AttentionSpec(SCALE, **options)
    qkv = [x.detach().float() for x in draw(5)]
    meta = PackedAttention.from_lengths((2, 3), torch.device("cpu"), "sdpa")
    assert meta.attend(LayerIndex(0), *qkv, spec).equal(sdpa.sdpa_attention(*qkv, (2, 3), spec))


@pytest.mark.parametrize("lengths", PACKS, ids=str)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_attention_that_is_not_causal_sees_its_full_document(lengths: list[int], kv_heads: int) -> None:
    qkv = draw(sum(lengths), kv_heads=kv_heads)
    expected = definition(*qkv, lengths, -1, causal=False)
    actual = sdpa.sdpa_attention(*qkv, tuple(lengths), AttentionSpec(SCALE, causal=False))
    assert relative_error(actual, expected) <= FORMULA_FP64
    weight = torch.randn_like(expected)
    for ours, theirs in zip(*(torch.autograd.grad(x, qkv, weight) for x in (actual, expected)), strict=True):
        if theirs.abs().max() > FORMULA_FP64:  # the score of a document's only token does not matter
            assert relative_error(ours, theirs) <= FORMULA_FP64


@pytest.mark.parametrize("backend", ["flash", "varlen"])
def test_kernels_are_told_that_attention_is_not_causal(backend: str, given: list[int]) -> None:
    qkv = draw(40, torch.bfloat16)
    meta = PackedAttention(torch.tensor([0, 9, 10, 40], dtype=torch.int32), 30)
    meta.backends = candidates(backend)
    actual = meta.attend(LayerIndex(0), *qkv, AttentionSpec(SCALE, causal=False))
    expected = definition(*(x.float() for x in qkv), [9, 1, 30], -1, causal=False)
    assert relative_error(actual.float(), expected) <= FLASH_BF16
    assert given == places(qkv), "without a copy"


def test_attention_that_is_not_causal_has_no_further_option() -> None:
    meta = PackedAttention(torch.tensor([0, 7], dtype=torch.int32), 7)
    with pytest.raises(ConfigError, match="attention that is not causal has window, soft_cap; expected none"):
        meta.attend(LayerIndex(0), *draw(7), AttentionSpec(SCALE, window=3, soft_cap=30.0, causal=False))


def test_documents_do_not_see_each_other() -> None:
    lengths = (3, 200, 5)
    q, k, v = (x.detach() for x in draw(208))
    before = sdpa.sdpa_attention(q, k, v, lengths, AttentionSpec(SCALE))
    for x in (q, k, v):
        x[3:203] = torch.randn_like(x[3:203])
    after = sdpa.sdpa_attention(q, k, v, lengths, AttentionSpec(SCALE))
    assert torch.equal(before[:3], after[:3])
    assert torch.equal(before[203:], after[203:])


def test_empty_documents_are_nothing() -> None:
    q, k, v = draw(7)
    with_empty = sdpa.sdpa_attention(q, k, v, (0, 3, 0, 4), AttentionSpec(SCALE))
    assert torch.equal(with_empty, sdpa.sdpa_attention(q, k, v, (3, 4), AttentionSpec(SCALE)))


def test_lengths_that_do_not_cover_the_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="documents have 6 tokens, but the input has 7"):
        sdpa.sdpa_attention(*draw(7), (3, 3), AttentionSpec(SCALE))


def test_auto_chooses_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    available_backends.cache_clear()
    with caplog.at_level(logging.INFO):
        assert resolve_backend("auto", torch.device("cpu"), torch.float32).name == "sdpa"
        assert resolve_backend("auto", torch.device("cuda", 0), torch.bfloat16).name == "varlen"
        assert resolve_backend("auto", torch.device("cuda", 0), torch.float32).name == "sdpa"
    assert "attention backend: sdpa (auto, cpu, torch.float32)" in caplog.text


@pytest.mark.parametrize(
    ("attn_type", "device", "dtype", "why"),
    [
        ("varlen", "cpu", torch.bfloat16, "CUDA only and the model is on cpu"),
        ("flash", "cpu", torch.bfloat16, "CUDA only and the model is on cpu"),
        ("varlen", "cuda", torch.float32, "the model computes in float32"),
        ("flash", "cuda", torch.bfloat16, r"flash-attn is not installed .*archon-engine\[flash\]"),
        ("eager", "cpu", torch.float32, "expected one of auto, sdpa, varlen, flash, fa4"),
    ],
)
def test_an_impossible_backend_is_an_error(attn_type: Any, device: str, dtype: torch.dtype, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve_backend(attn_type, torch.device(device), dtype)


def reference_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """The interface of flash-attn 2's `flash_attn_varlen_func`, its documented preconditions, and its meaning."""
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.dim() == k.dim() == v.dim() == 3
    assert k.shape == v.shape
    assert q.shape[1] % k.shape[1] == 0
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert isinstance(max_seqlen_q, int)
    assert max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
    assert (dropout_p, alibi_slopes, return_attn_probs, block_table) == (0.0, None, False, None)
    assert not causal or window_size[1] in (-1, 0)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    lengths = cu_seqlens_q.diff().tolist()
    return definition(q.float(), k.float(), v.float(), lengths, window_size[0], scale, causal, softcap).to(q.dtype)


def reference_flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, None, Tensor]:
    """flash-attn 2's `_flash_attn_varlen_forward`, which takes no softmax scale of None."""
    assert (dropout_p, causal, alibi_slopes, max_seqlen_q) == (0.0, True, None, max_seqlen_k)
    assert window_size_right in (-1, 0)
    lengths = cu_seqlens_q.diff().tolist()
    found = with_lse(q.float(), k.float(), v.float(), lengths, window_size_left, softmax_scale, causal, softcap)
    return found[0].to(q.dtype), found[1], None, torch.zeros(2, dtype=torch.int64)


def reference_flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """flash-attn 2's `_flash_attn_varlen_backward`, which fills the gradients it is given."""
    assert (dropout_p, causal, alibi_slopes, max_seqlen_q) == (0.0, True, None, max_seqlen_k)
    of_document = cu_seqlens_q.diff().tolist(), window_size_left, softmax_scale, causal, softcap
    for given, found in zip((dq, dk, dv), kernel_backward(grad, q, k, v, out, softmax_lse, *of_document), strict=True):
        given.copy_(found)
    return torch.empty(0)


def reference_varlen(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
    """torch's `varlen_attn`: the call is bound to its real signature, and carried out by the definition."""
    call = inspect.signature(REAL_VARLEN).bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    assert given["window_size"][1] in (0, -1), "causal, or the full document"
    causal = given["window_size"][1] == 0
    assert given["enable_gqa"] or given["query"].shape[1] == given["key"].shape[1]
    lengths = given["cu_seq_q"].diff().tolist()
    qkv = (given[name].float() for name in ("query", "key", "value"))
    out, lse = with_lse(*qkv, lengths, given["window_size"][0], given["scale"], causal, 0.0)
    out = out.to(given["query"].dtype)
    return (out, lse) if given["return_aux"] is not None and given["return_aux"].lse else out


def reference_varlen_backward(*args: Any) -> tuple[Tensor, ...]:
    """The operator of its gradient, bound to its real signature."""
    call = inspect.signature(REAL_VARLEN_BACKWARD._init_fn).bind(*args)
    given = call.arguments
    left, right = given["window_size"]
    assert right == 0 and given["is_causal"] == (left == -1)
    assert given["rng_state"].dtype == torch.uint64 and given["lse"].dtype == torch.float32
    names = ("grad_out", "query", "key", "value", "out", "lse")
    lengths = given["cu_seq_q"].diff().tolist()
    grads = kernel_backward(*(given[name] for name in names), lengths, left, given["scale"], True, 0.0)
    return tuple(grad.to(given["query"].dtype) for grad in grads)


def places(tensors: Iterable[Tensor]) -> list[int]:
    """Where each begins in memory."""
    return [x.data_ptr() for x in tensors]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Put both kernels' references in their place; the places of the queries, keys and values they are given."""
    found: list[int] = []

    def noted(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            found.extend(places(args[:3]))
            return kernel(*args, **kwargs)

        return call

    module, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    module.flash_attn_varlen_func = noted(reference_flash)  # type: ignore[attr-defined]
    interface._flash_attn_varlen_forward = noted(reference_flash_forward)  # type: ignore[attr-defined]
    interface._flash_attn_varlen_backward = reference_flash_backward  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    monkeypatch.setattr(varlen, "_varlen_attn_backward", reference_varlen_backward)
    monkeypatch.setattr(varlen, "varlen_attn", functools.wraps(REAL_VARLEN)(noted(reference_varlen)))
    varlen_backend._has_enable_gqa.cache_clear()
    return found


@pytest.mark.parametrize("backend", ["flash", "varlen"])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_kernels_are_called_by_their_contract(
    backend: Any, window: int | None, kv_heads: int, given: list[int]
) -> None:
    lengths = (9, 1, 30)
    qkv = draw(40, torch.bfloat16, kv_heads=kv_heads)
    meta = PackedAttention(torch.tensor([0, 9, 10, 40], dtype=torch.int32), 30)
    meta.backends = candidates(backend)
    actual = meta.attend(LayerIndex(0), *qkv, AttentionSpec(SCALE, window))
    expected = sdpa.sdpa_attention(*(x.float() for x in qkv), lengths, AttentionSpec(SCALE, window))
    assert actual.dtype == torch.bfloat16
    assert relative_error(actual.float(), expected) <= FLASH_BF16
    assert given == places(qkv), "without a copy"


@pytest.mark.parametrize(("backend", "soft_cap"), [("flash", None), ("flash", 1.5), ("varlen", None)])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_kernels_with_sinks_are_called_by_their_contract(
    backend: str, soft_cap: float | None, window: int | None, kv_heads: int, given: list[int]
) -> None:
    """The kernels' own gradients, given results and log-sum-exp with sinks."""
    qkv, sinks = draw(40, torch.bfloat16, kv_heads=kv_heads), torch.randn(4, requires_grad=True)
    meta = PackedAttention(torch.tensor([0, 9, 10, 40], dtype=torch.int32), 30)
    meta.backends = candidates(backend)
    actual = meta.attend(LayerIndex(0), *qkv, AttentionSpec(SCALE, window, soft_cap, sinks))
    assert given == places(qkv), "without a copy"
    exact = [x.detach().double().requires_grad_() for x in (*qkv, sinks)]
    spec = AttentionSpec(SCALE, window, soft_cap, exact[3])
    expected = sdpa.sdpa_attention(*exact[:3], (9, 1, 30), spec)
    assert actual.dtype == torch.bfloat16
    assert relative_error(actual.double(), expected) <= FLASH_BF16
    weight = torch.randn_like(expected).bfloat16()
    ours = torch.autograd.grad(actual, (*qkv, sinks), weight)
    for a, b in zip(ours, torch.autograd.grad(expected, exact, weight.double()), strict=True):
        assert relative_error(a.double(), b) <= 2 * FLASH_BF16


def test_flash_attn_is_told_of_a_soft_cap(given: list[int]) -> None:
    qkv = draw(40, torch.bfloat16)
    meta = PackedAttention(torch.tensor([0, 9, 10, 40], dtype=torch.int32), 30)
    meta.backends = candidates("flash")
    spec = AttentionSpec(SCALE, soft_cap=1.0)
    expected = sdpa.sdpa_attention(*(x.float() for x in qkv), (9, 1, 30), spec)
    assert relative_error(meta.attend(LayerIndex(0), *qkv, spec).float(), expected) <= FLASH_BF16


@pytest.mark.parametrize("backend", ["flash", "varlen"])
def test_a_layer_hands_the_kernel_what_it_turned_and_projected_without_a_copy(
    backend: Any, given: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Tensor] = []  # kept, so that nothing else takes their places

    def turn(*args: Tensor) -> Tensor:
        made.append(norm_and_rotate(*args))
        return made[-1]

    norm_and_rotate = attention_layer.norm_and_rotate
    monkeypatch.setattr(attention_layer, "norm_and_rotate", turn)
    module = attention_layer.AttentionLayer(4, 2, 8, qk_norm=NormSpec(1e-6)).build(0, 32)
    module.bfloat16().wv.register_forward_hook(lambda _module, _args, out: made.insert(0, out))
    meta = PackedAttention(torch.tensor([0, 9, 10, 40], dtype=torch.int32), 30)
    meta.backends = candidates(backend)
    angles = torch.rand(40, 1, 4, dtype=torch.bfloat16)
    module(torch.randn(40, 32, dtype=torch.bfloat16), Rotation(angles.cos(), angles.sin()), meta)
    values, queries, keys = made
    assert given == places((queries, keys, values))


def test_lengths_are_read_from_the_device_once_and_only_when_needed() -> None:
    meta = PackedAttention(torch.tensor([0, 2, 5], dtype=torch.int32), 3)
    assert "lengths" not in vars(meta.documents)
    assert meta.documents.lengths == (2, 3)
    assert meta.documents.lengths is meta.documents.lengths
    assert PackedAttention(meta.documents.cu_seqlens, 3, lengths=(2, 3)).documents.lengths == (2, 3)
    assert meta.document_lengths(torch.zeros(5)).tolist() == [2, 2, 3, 3, 3]


def test_documents_attend_within_compiled_code_without_a_graph_break() -> None:
    lengths = (3, 3, 3, 5, 5, 5)
    qkv = [torch.randn(24, 2, 8) for _ in range(3)]
    meta = PackedAttention.from_lengths(lengths, torch.device("cpu"), "sdpa")
    meta.prepare(qkv[0])

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return meta.attend(LayerIndex(0), q, k, v, AttentionSpec(SCALE))

    compiled = torch.compile(attend, backend="eager", fullgraph=True)(*qkv)
    torch.testing.assert_close(compiled, definition(*qkv, list(lengths), -1), rtol=0, atol=1e-6)


def test_a_backend_names_what_it_does_not_compute() -> None:
    meta = PackedAttention(torch.tensor([0, 7], dtype=torch.int32), 7)
    meta.backends = candidates("varlen")
    message = "attn_type 'varlen' does not support soft_cap, .* it supports bidirectional, sinks, window"
    with pytest.raises(ConfigError, match=message):
        meta.attend(LayerIndex(0), *draw(7), AttentionSpec(SCALE, soft_cap=30.0))


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="attention backend 'sdpa' is already registered"):
        register_attention_backend(candidates("sdpa")[0])


@pytest.mark.parametrize("window", [None, 2, 5, 100])
def test_the_operator_of_compiled_code_and_its_gradients_equal_the_definition(window: int | None) -> None:
    lengths = [7, 7, 20, 1]
    qkv = draw(sum(lengths))
    expected = definition(*qkv, lengths, -1 if window is None else window - 1)
    actual = torch.ops.archon.packed_sdpa(*qkv, None, torch.tensor(lengths), window or 0, SCALE, 0.0)
    assert relative_error(actual, expected) <= FORMULA_FP64
    weight = torch.randn_like(expected)
    for ours, theirs in zip(*(torch.autograd.grad(x, qkv, weight) for x in (actual, expected)), strict=True):
        assert relative_error(ours, theirs) <= FORMULA_FP64


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["sdpa", "varlen", "fa4"])
@pytest.mark.parametrize("window", [None, 5, 100])
def test_gpu_backends_equal_the_definition(backend: Any, window: int | None) -> None:
    if backend == "fa4" and (why := candidates(backend)[0].unsupported_reason(torch.device("cuda"), torch.bfloat16)):
        pytest.skip(why)
    lengths, dtype = [300, 17, 1, 64], torch.float32 if backend == "sdpa" else torch.bfloat16
    qkv = [torch.randn(382, h, 64, dtype=dtype, device="cuda", requires_grad=True) for h in (4, 2, 2)]
    meta = PackedAttention(torch.tensor([0, 300, 317, 318, 382], dtype=torch.int32, device="cuda"), 300, backend)
    actual = meta.attend(LayerIndex(0), *qkv, AttentionSpec(SCALE, window))
    exact = [x.detach().cpu().double().requires_grad_() for x in qkv]
    expected = definition(*exact, lengths, -1 if window is None else window - 1)
    assert relative_error(actual.cpu().double(), expected) <= FLASH_BF16
    weight = torch.randn_like(expected)
    ours = torch.autograd.grad(actual, qkv, weight.to("cuda", dtype))
    for a, b in zip(ours, torch.autograd.grad(expected, exact, weight), strict=True):
        assert relative_error(a.cpu().double(), b) <= 2 * FLASH_BF16
