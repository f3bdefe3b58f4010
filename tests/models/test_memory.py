"""What must never be whole in memory: logits of all tokens, and scores or masks of all pairs of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from archon.models.layers.head import LMHead
from archon.models.qwen3 import Qwen3Model, Qwen3ModelArgs
from tests.models.recorder import LargestAllocation

TOKENS, VOCAB = 3000, 6000


def test_the_recorder_sees_what_it_is_for() -> None:
    head, hidden = LMHead(8, VOCAB), torch.randn(TOKENS, 8)
    with LargestAllocation() as recorder:
        head(hidden).log_softmax(-1).sum().backward()
    assert recorder.elements >= TOKENS * VOCAB


@pytest.mark.parametrize("use", ["logprobs", "logprobs and entropy", "weighted loss", "no gradient"])
def test_never_tokens_by_vocabulary(use: str) -> None:
    head, hidden = LMHead(8, VOCAB), torch.randn(TOKENS, 8, requires_grad=use != "no gradient")
    labels = torch.randint(0, VOCAB, (TOKENS,))
    with LargestAllocation() as recorder:
        if use == "weighted loss":
            head(hidden, labels, weights=torch.rand(TOKENS)).loss.backward()
        elif use == "no gradient":
            with torch.no_grad():
                head(hidden, labels)
        else:
            scores = head(hidden, labels, entropy=use == "logprobs and entropy")
            sum(score.sum() for score in scores if score is not None).backward()
    assert recorder.elements <= TOKENS * VOCAB * 0.4, recorder.operation


@pytest.mark.parametrize("options", [{}, {"attention_sinks": True, "attention_soft_cap": 2.0}], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 3, 700])
@pytest.mark.parametrize("lengths", [[4096], [1500, 1500, 1096], [64] * 64])
def test_never_tokens_by_tokens(window: int | None, lengths: list[int], options: dict[str, Any]) -> None:
    args = Qwen3ModelArgs(
        dim=8,
        n_layers=1,
        n_heads=2,
        n_kv_heads=1,
        head_dim=4,
        hidden_dim=8,
        vocab_size=16,
        sliding_window=window,
        **options,
    )
    model, total = Qwen3Model(args), sum(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    tokens = torch.randint(0, 16, (total,))
    with LargestAllocation() as recorder:
        scores = model(tokens, positions, cu_seqlens, max(lengths), labels=tokens)
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
    assert recorder.elements <= total * total * 0.1, recorder.operation
