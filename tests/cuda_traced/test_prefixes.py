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
    ("prefix", "window", "has_sinks", "before", "launches"),
    # Without kernels that select and merge, and with them; 4 are attention, with a window 2. Short documents are trees.
    [(160, None, False, 40, 8), (40, None, False, 45, 8), (160, None, True, 49, 16), (160, 45, False, 11, 4)],
    ids=["causal", "trees", "sinks", "window"],
)
def test_launches(
    traced: Callable[..., None], prefix: int, window: int | None, has_sinks: bool, before: int, launches: int
) -> None:
    traced("", "varlen", f"shared prefixes: {launches} launches a layer; {before} without kernels")
    documents = [
        torch.cat([torch.arange(prefix) + prompt, torch.arange(20) + 9 * answer])
        for prompt in (0, 1)
        for answer in range(4)
    ]
    shared = shared_prefixes(torch.cat(documents), [prefix + 20] * 8)
    assert shared is not None and bool(shared.trees) == (prefix == 40)
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
