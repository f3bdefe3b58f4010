"""The language-model head: logits, or token log-probabilities and entropies in chunks that never hold [T, vocab]."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from archon.models.layers.linear import Role

IGNORE_INDEX = -100


class TokenScores(NamedTuple):
    """Per token, in at least float32: log p(label) and the entropy of p in nats; 0 where the label is ignored.

    `entropy` is None where it was not asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None


class WeightedLoss(NamedTuple):
    """`loss` = the sum of -weight * log p(label), a scalar with gradient; `logprobs` [T] per token, without."""

    loss: Tensor
    logprobs: Tensor


class LMHead(nn.Linear):
    """Projection to the vocabulary, weight [vocab, dim], no bias."""

    role: Role = "head"

    def __init__(self, dim: int, vocab_size: int) -> None:
        super().__init__(dim, vocab_size, bias=False)

    def forward(self, hidden, labels=None, temperature=1.0, *, entropy=True, weights=None):  # type: ignore[no-untyped-def,override]
        logits = super().forward(hidden)
        if labels is None:
            return logits
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        logp = wide.log_softmax(-1)
        kept = labels != IGNORE_INDEX
        logprobs = torch.where(kept, logp.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1), 0)
        if weights is not None:
            return WeightedLoss(-(logprobs * weights).sum(), logprobs.detach())
        return TokenScores(logprobs, torch.where(kept, -(logp.exp() * logp).sum(-1), 0) if entropy else None)
