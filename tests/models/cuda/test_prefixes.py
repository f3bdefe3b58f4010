"""Kernels around attention over shared prefixes against plain float64 formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from archon.models.attention.prefix import cascade
from archon.models.attention.prefix.cascade import Part, cascade_attention
from archon.models.attention.prefix.plan import shared_prefixes
from archon.models.attention.spec import AttentionSpec
from archon.models.cuda.prefixes import add_context_grads, merge_context, select_context, select_keys
from tests.models.naive_attention import NaiveAttention
from tests.models.test_cascade import SCALE, MathKernel, attend_whole, history
from tests.models.test_sinks import documents_of

# Sums in another order in float32; one rounding in bfloat16.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1.6e-2}
# Heads and features of queries, keys and values; the last more than a program copies at a time.
SHAPES = [(1, 1, 1, 1), (6, 3, 24, 8), (10, 2, 136, 136)]


def _part(device: torch.device) -> Part:
    """Return 3 documents of 12 tokens; token 1 is a key of two, and tokens 0, 2, 7 and 8 are no queries."""
    queries = [[(3, 2), (9, 1)], [(5, 2)], [(10, 2), (1, 1)]]
    return Part.from_spans(queries, [[(0, 3)], [(1, 1), (7, 1)], [(0, 1), (8, 2)]], 12, device)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "features", "value_features"), SHAPES)
def test_contexts_are_selected_and_merged(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, features: int, value_features: int
) -> None:
    part, tolerance = _part(device), TOLERANCE[dtype]

    def random(*shape: int) -> Tensor:
        return torch.randn(shape).to(device, dtype)

    # 1. Queries are a view of a wider product, as of joint projections.
    q = random(12, heads + 2, features)[:, 1:-1]
    k, v, grad, out = (
        random(12, *x) for x in ((kv_heads, features), (kv_heads, value_features), *[(heads, value_features)] * 2)
    )
    lse = torch.randn(heads, 12, device=device)
    for results in ([], [grad, out, lse]):
        selected = select_context(q, k, v, part.query_rows, part.key_rows, results)
        expected = cascade._select(part, *(x.double() for x in (q, k, v, *results)))
        assert len(selected) == len(expected)
        assert all(torch.equal(x.double(), reference) for x, reference in zip(selected, expected, strict=True))

    # 2. Log-sum-exps far from each other, and sinks.
    context_out, context_lse = random(8, heads, value_features), 40 * torch.randn(heads, 8, device=device)
    for sinks in (None, random(heads)):
        wide = None if sinks is None else sinks.double()
        merged = merge_context(out, lse, context_out, context_lse, part.query_slots, sinks)
        results = (x.double() for x in (out, lse, context_out, context_lse))
        for x, reference in zip(merged, cascade._merge(part, *results, wide), strict=True):
            torch.testing.assert_close(x.double(), reference, rtol=tolerance, atol=tolerance)

    # 3. Gradients of selected keys.
    leaves = [k.requires_grad_(), v.requires_grad_()]
    wide_leaves = [x.detach().double().requires_grad_() for x in leaves]
    grads = [random(8, kv_heads, features), random(8, kv_heads, value_features)]
    torch.autograd.backward(select_keys(*leaves, part.key_rows, part.key_starts, part.key_positions), grads)
    torch.autograd.backward(cascade._select_keys(part, *wide_leaves), [x.double() for x in grads])
    for leaf, reference in zip(leaves, wide_leaves, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad.double(), reference.grad, rtol=tolerance, atol=2 * tolerance)

    # 4. Gradients of contexts, added to those of runs.
    grads = [random(12, *x.shape[1:]) for x in (q, k, v)]
    context_grads = [random(rows, *x.shape[1:]) for rows, x in ((8, q), (8, k), (8, v))]
    wide_grads = [[x.double() for x in some] for some in (grads, context_grads)]
    expected = cascade._add_grads(part, *wide_grads, torch.float64)
    add_context_grads(*grads, context_grads, part.query_slots, part.key_starts, part.key_positions)
    for x, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(x.double(), reference, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 45])
def test_attention_over_a_tree_of_contexts(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, window: int | None, with_sinks: bool
) -> None:
    monkeypatch.setattr(cascade, "_has_kernels", lambda _: True)
    tokens, lengths = history(3)
    plan = shared_prefixes(tokens, lengths)
    assert plan is not None
    shared = plan.to(device)
    qkv = [torch.randn(len(shared.rows), heads, 6).to(device).requires_grad_() for heads in (4, 2, 2)]
    sinks = torch.randn(4).to(device).requires_grad_() if with_sinks else None
    wide = [x.detach().double().cpu().requires_grad_() for x in (*qkv, *([] if sinks is None else [sinks]))]
    spec = AttentionSpec(SCALE, window, None, sinks)
    out = cascade_attention(*qkv, shared.cascade, spec, attend_whole, MathKernel)

    wide_spec = AttentionSpec(SCALE, window, None, wide[3] if with_sinks else None)
    whole = (x.index_select(0, plan.gather_index) for x in wide[:3])
    expected = NaiveAttention().attend_packed(*whole, documents_of(lengths), wide_spec)
    actual = out.index_select(0, shared.gather_index)
    torch.testing.assert_close(actual.double().cpu(), expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn(expected.shape)
    actual.backward(grad.to(actual))
    expected.backward(grad.double())
    for x, reference in zip([*qkv, *([] if sinks is None else [sinks])], wide, strict=True):
        assert x.grad is not None and reference.grad is not None
        torch.testing.assert_close(x.grad.double().cpu(), reference.grad, rtol=1e-4, atol=1e-4)
