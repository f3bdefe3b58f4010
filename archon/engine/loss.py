"""Loss functions of the engine, as pure functions of tensors.

A loss function takes the model's outputs for a micro-batch in the alignment of `archon.engine.batch`: index t holds
the prediction of token t + 1, and 0 at masked tokens. It returns the *sum* over units (tokens or sequences), never a
mean. Its weight function counts these units. The engine divides the sum of all micro-batches by the count of all
micro-batches, so that padding, packing and the number of micro-batches do not change a gradient. Every micro-batch must
report the same metric names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from archon.engine.batch import PackedBatch

Metrics = dict[str, tuple[Tensor, Tensor]]
"""Metric name to two scalar tensors, sum and count; the engine adds both over micro-batches and reports sum / count."""

LossWeightFn = Callable[[PackedBatch], Tensor]
"""Function that counts the units of a micro-batch, on the CPU before the forward."""


@runtime_checkable
class WeightedTokenLoss(Protocol):
    """Loss Σ -w_t log p_t with weights that do not depend on the model's outputs, so that head and loss run fused.

    `metrics` receives detached logprobs.
    """

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, mb: PackedBatch) -> tuple[Tensor, Metrics]:
        """Return the loss and the metrics of token scores."""
        ...

    def token_weights(self, mb: PackedBatch) -> Tensor:
        """Return the weights w, float [T]."""
        ...

    def metrics(self, logprobs: Tensor, mb: PackedBatch) -> Metrics:
        """Return the metrics of `__call__`."""
        ...


LossFn = Callable[[Tensor, Tensor | None, PackedBatch], Tensor | tuple[Tensor, Metrics]] | WeightedTokenLoss
"""Function of label logprobs [T], entropies [T] or None, and the micro-batch, to a scalar sum or (sum, metrics).

It does not see logits, hidden states or the log-probabilities of other tokens; `archon.models.layers.token_scores`
computes the scores of the head.

A critic's loss receives values [T] in place of logprobs, and None for the entropy. The attribute
`needs_entropy = False` skips the entropy.
"""


class CrossEntropyLoss:
    """Next-token cross-entropy, summed over `loss_mask`; its weight function is `loss_token_count`."""

    needs_entropy = False

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, mb: PackedBatch) -> tuple[Tensor, Metrics]:
        """Return the summed cross-entropy and the metrics."""
        return -(logprobs * mb["loss_mask"]).sum(), self.metrics(logprobs, mb)

    def token_weights(self, mb: PackedBatch) -> Tensor:
        """Return the loss mask as float weights [T]."""
        return mb["loss_mask"].float()

    def metrics(self, logprobs: Tensor, mb: PackedBatch) -> Metrics:
        """Return `token_prob`, the mean probability of the correct token."""
        return {"token_prob": masked_sum(logprobs.detach().exp(), mb["loss_mask"])}


def loss_token_count(mb: PackedBatch) -> Tensor:
    """Return the number of trained tokens, the weight of a token-mean loss."""
    return mb["loss_mask"].sum()


def masked_sum(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the (sum, count) of values [T] where mask [T] is not 0."""
    is_kept = mask != 0
    return torch.where(is_kept, values, 0).sum(), is_kept.sum()


def document_ids(mb: PackedBatch) -> Tensor:
    """Return each token's document index [T] on the micro-batch's device, without a host sync."""
    lengths = mb.cu_seqlens.diff().long()
    ids = torch.arange(mb.n_documents, device=lengths.device)
    return torch.repeat_interleave(ids, lengths, output_size=mb.n_tokens)


def document_sums(values: Tensor, mb: PackedBatch) -> Tensor:
    """Return the per-document sums [B] of values [T], with gradient, for sequence-level losses."""
    return values.new_zeros(mb.n_documents).index_add(0, document_ids(mb), values)
