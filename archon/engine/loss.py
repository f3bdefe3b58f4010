"""Losses of the engine and the sums that losses need. Pure functions of tensors.

A loss function takes the model's outputs for a micro-batch, in the alignment of `archon.engine.batch` (index t holds
the values for predicting token t + 1; they are 0 at masked tokens), and returns the *sum* over units (tokens or
sequences), never a mean; its weight function counts those units. The engine divides the sum over all micro-batches by
the count over all micro-batches, so that neither padding, nor packing, nor the number of micro-batches changes a
gradient. The names of the metrics are the same for every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from archon.engine.batch import PackedBatch

Metrics = dict[str, tuple[Tensor, Tensor]]
"""Name to (sum, count), both scalars; the engine adds them over micro-batches and reports sum / count."""

LossWeightFn = Callable[[PackedBatch], Tensor]
"""Counts the units that the loss function sums over in a micro-batch; runs on the CPU, before the model."""


@runtime_checkable
class WeightedTokenLoss(Protocol):
    """A loss Σ -w_t log p_t with weights known before the forward: head and loss run in one fused, chunked pass.

    `metrics` receives detached logprobs.
    """

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, mb: PackedBatch) -> tuple[Tensor, Metrics]: ...

    def token_weights(self, mb: PackedBatch) -> Tensor:
        """Returns w, float [T]."""
        ...

    def metrics(self, logprobs: Tensor, mb: PackedBatch) -> Metrics:
        """Returns the metrics of `__call__`."""
        ...


LossFn = Callable[[Tensor, Tensor | None, PackedBatch], Tensor | tuple[Tensor, Metrics]] | WeightedTokenLoss
"""(logprobs [T], entropy [T] or None, micro-batch) to a scalar sum, with metrics or without.

A critic's loss gets values [T] instead of logprobs, and None for the entropy. With an attribute `needs_entropy = False`
the head computes no entropies.
"""


class CrossEntropyLoss:
    """Next-token cross-entropy, summed over the tokens that `loss_mask` marks; weigh it with `loss_token_count`."""

    needs_entropy = False

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, mb: PackedBatch) -> tuple[Tensor, Metrics]:
        return -(logprobs * mb["loss_mask"]).sum(), self.metrics(logprobs, mb)

    def token_weights(self, mb: PackedBatch) -> Tensor:
        return mb["loss_mask"].float()

    def metrics(self, logprobs: Tensor, mb: PackedBatch) -> Metrics:
        """Returns `token_prob`, the mean probability of the correct token."""
        return {"token_prob": masked_sum(logprobs.detach().exp(), mb["loss_mask"])}


def loss_token_count(mb: PackedBatch) -> Tensor:
    """Returns the number of trained tokens: the weight of every token-mean loss."""
    return mb["loss_mask"].sum()


def masked_sum(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum of values [T] over the tokens where mask [T] is not 0, and their number: a metric pair."""
    kept = mask != 0
    return torch.where(kept, values, 0).sum(), kept.sum()


def document_ids(mb: PackedBatch) -> Tensor:
    """Returns the index [T] of each token's document in the micro-batch, on its device, without synchronization."""
    lengths = mb.cu_seqlens.diff().long()
    ids = torch.arange(mb.n_documents, device=lengths.device)
    return torch.repeat_interleave(ids, lengths, output_size=mb.n_tokens)


def document_sums(values: Tensor, mb: PackedBatch) -> Tensor:
    """Returns the sum of values [T] over each document, [B], with gradient, for sequence-level losses."""
    return values.new_zeros(mb.n_documents).index_add(0, document_ids(mb), values)
