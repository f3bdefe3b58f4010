"""Launches of attention over shared prefixes, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from archon.models.attention.meta import PrefixAttention
from archon.models.attention.prefix.plan import shared_prefixes
from archon.models.attention.spec import AttentionSpec
from tests.cuda_traced.trace import CUDA, cuda_trace, run_backward

pytestmark = pytest.mark.cuda_traced


@pytest.mark.parametrize(
    ("window", "has_sinks", "before", "launches"),
    # Without kernels that select and merge, and with them; 4 are attention, without a context 2.
    [(None, False, 40, 8), (None, True, 49, 16), (45, False, 11, 8)],
    ids=["causal", "sinks", "window"],
)
def test_launches(traced: Callable[..., None], window: int | None, has_sinks: bool, before: int, launches: int) -> None:
    traced("", "varlen", f"shared prefixes: {launches} launches a layer; {before} without kernels")
    documents = [
        torch.cat([torch.arange(160) + prompt, torch.arange(40) + 9 * answer])
        for prompt in (0, 1)
        for answer in range(4)
    ]
    shared = shared_prefixes(torch.cat(documents), [200] * 8)
    assert shared is not None and not shared.trees
    with cuda_trace() as trace:
        q, k, v = (
            torch.empty(len(shared.rows), heads, 16, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
            for heads in (4, 2, 2)
        )
        sinks = torch.empty(4, device=CUDA, requires_grad=True) if has_sinks else None
        attention = PrefixAttention(shared.to(CUDA), "varlen")
        attention.prepare(q)
        for layer in range(2):
            trace.launches = 0
            out = attention.attend(layer, q, k, v, AttentionSpec(0.1, window, sinks=sinks))
            grads = run_backward(out, torch.empty_like(out))
            assert len(grads) == 3 + has_sinks
            assert trace.launches <= launches
    assert not trace.waits
