"""Cascade attention around kernels that return a log-sum-exp, against attention of whole documents."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from archon.models.attention.prefix.cascade import Bounds, cascade_attention
from archon.models.attention.prefix.plan import SharedPrefixes, shared_prefixes
from archon.models.attention.sinks import KernelWithLse
from archon.models.attention.spec import AttentionSpec
from tests.models.naive_attention import NaiveAttention, attend
from tests.models.test_prefix import answers
from tests.models.test_sinks import check, documents_of, draw, draw_sinks

SCALE = 0.4


@dataclass
class MathKernel(KernelWithLse):
    """FlashAttention's two halves by the definition, document by document, the last query at the last key."""

    queries: Bounds
    keys: Bounds
    spec: AttentionSpec

    def documents(self, q: Tensor, k: Tensor) -> list[tuple[slice, slice, Tensor, Tensor]]:
        """Of each document its queries and keys, scaled scores [H, S, L] with the mask, and the slope of a soft cap."""
        assert self.spec.sinks is None
        found = []
        for (a, b), (c, d) in zip(
            *(torch.stack((x[:-1], x[1:]), 1).tolist() for x in (self.queries[0], self.keys[0])), strict=True
        ):
            assert 0 < b - a <= self.queries.longest and 0 < d - c <= self.keys.longest
            heads = k[c:d].repeat_interleave(q.shape[1] // k.shape[1], 1)
            raw = torch.einsum("shd,lhd->hsl", q[a:b], heads) * self.spec.scale
            scores, slope = raw, torch.ones_like(raw)
            if self.spec.soft_cap is not None:
                scores = self.spec.soft_cap * (raw / self.spec.soft_cap).tanh()
                slope = 1 - (scores / self.spec.soft_cap).square()
            behind = torch.arange(d - c - (b - a), d - c).unsqueeze(1) - torch.arange(d - c)
            hidden = torch.zeros_like(behind, dtype=torch.bool)
            if self.spec.causal:
                hidden |= behind < 0
            if self.spec.window is not None:
                hidden |= behind >= self.spec.window
            found.append((slice(a, b), slice(c, d), scores.masked_fill(hidden, -torch.inf), slope))
        return found

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q))
        for queries, keys, scores, _ in self.documents(q, k):
            lse[:, queries] = scores.logsumexp(-1)
            values = v[keys].repeat_interleave(q.shape[1] // v.shape[1], 1)
            out[queries] = torch.einsum("hsl,lhd->shd", scores.softmax(-1), values)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = q.shape[1] // k.shape[1]
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for queries, keys, scores, slope in self.documents(q, k):
            heads, values = (x[keys].repeat_interleave(group, 1) for x in (k, v))
            p = (scores - lse[:, queries].unsqueeze(-1)).exp()
            row_sums = (grad[queries] * out[queries]).sum(-1).t().unsqueeze(-1)
            ds = p * (torch.einsum("shd,lhd->hsl", grad[queries], values) - row_sums) * slope * self.spec.scale
            dq[queries] = torch.einsum("hsl,lhd->shd", ds, heads)
            dk[keys] += torch.einsum("hsl,shd->lhd", ds, q[queries]).unflatten(1, (-1, group)).sum(2)
            dv[keys] += torch.einsum("hsl,shd->lhd", p, grad[queries]).unflatten(1, (-1, group)).sum(2)
        return dq, dk, dv


def attend_whole(q: Tensor, k: Tensor, v: Tensor, kernel: MathKernel) -> Tensor:
    """What a backend's own differentiable call computes."""
    sides = (x.diff().tolist() for x in (kernel.queries.cu_seqlens, kernel.keys.cu_seqlens))
    of_queries, of_keys = sides
    parts = zip(q.split(of_queries), k.split(of_keys), v.split(of_keys), strict=True)
    return torch.cat([attend(*document, kernel.spec) for document in parts])


def history(turns: int, tokens: int = 30) -> tuple[Tensor, tuple[int, ...]]:
    """An agent's turns, of which each repeats what came before, and one is tried twice."""
    generator = torch.Generator().manual_seed(3)
    before, documents = list[int](), list[list[int]]()
    for turn in range(turns):
        tried = [torch.randint(0, 9, (tokens + n,), generator=generator).tolist() for n in (turn, 2 * turn + 1)]
        documents += [[*before, 100 + n, *own] for n, own in enumerate(tried)]
        before = documents[-2]
    return torch.tensor([x for d in documents for x in d]), tuple(map(len, documents))


FORESTS = {
    "answers": lambda: answers([40, 60, 6], per_prompt=4, longest=150, seed=1),
    "short answers": lambda: answers([6, 40, 6], per_prompt=4, longest=6, seed=1),
    "a history": lambda: history(4),
}


@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (None, 1.5), (1, None), (45, None)])
@pytest.mark.parametrize("forest", FORESTS)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_attention_and_gradients_are_those_of_whole_documents(
    forest: str, window: int | None, soft_cap: float | None, with_sinks: bool, kv_heads: int
) -> None:
    tokens, lengths = FORESTS[forest]()
    shared = shared_prefixes(tokens, lengths)
    assert shared is not None
    qkv, sinks = draw(len(shared.rows), kv_heads=kv_heads), draw_sinks(with_sinks)
    spec = AttentionSpec(SCALE, window, soft_cap, sinks)
    whole = (x.index_select(0, shared.gather_index) for x in qkv)
    expected = NaiveAttention().attend_packed(*whole, documents_of(lengths), spec)
    found = cascade_attention(*qkv, shared.cascade, spec, attend_whole, MathKernel)
    check(found.index_select(0, shared.gather_index), expected, [*qkv, sinks])


def test_a_context_is_read_once_for_all_runs_after_it() -> None:
    tokens, lengths = answers([60, 90], per_prompt=8, longest=150, seed=1)
    shared = shared_prefixes(tokens, lengths)
    assert shared is not None and shared.cascade.contexts is not None
    contexts = shared.cascade.contexts
    assert contexts.keys.cu_seqlens.diff().tolist() == [60, 90]
    assert len(contexts.query_rows) == contexts.queries.cu_seqlens[-1] < len(shared.rows)


def test_padding_is_one_more_run() -> None:
    tokens, lengths = answers([60, 90], per_prompt=8, longest=150, seed=1)
    shared = shared_prefixes(tokens, lengths)
    assert shared is not None
    padded: SharedPrefixes = shared.padded(5)
    spec, qkv = AttentionSpec(SCALE), draw(len(shared.rows) + 5)
    given = attend_whole, MathKernel
    expected = cascade_attention(*(x[:-5] for x in qkv), shared.cascade, spec, *given)
    torch.testing.assert_close(cascade_attention(*qkv, padded.cascade, spec, *given)[:-5], expected, rtol=0, atol=0)
