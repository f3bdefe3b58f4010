"""Aggregation of per-token losses into one number.

An aggregation returns token weights and a number of units. The engine sums weight · loss over all micro-batches and
ranks and divides by the total number of units, so the result does not depend on the packing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from archon.rl.algorithms.registry import MethodRegistry, MethodSettings

# (loss_mask [T] float, document_ids [T] int, number of documents, settings) -> (token weights [T], units [])
AggregationFn = Callable[[Tensor, Tensor, int, Any], tuple[Tensor, Tensor]]
AGGREGATIONS: MethodRegistry[AggregationFn] = MethodRegistry("aggregation", MethodSettings)


def sums_by_document(values: Tensor, documents: Tensor, n_documents: int) -> Tensor:
    """Return the sum of the values over each document, [n_documents]."""
    return values.new_zeros(n_documents).index_add(0, documents, values)


@AGGREGATIONS.register("token_mean")
def token_mean(
    loss_mask: Tensor, documents: Tensor, n_documents: int, settings: MethodSettings
) -> tuple[Tensor, Tensor]:
    """Mean over all loss tokens of the global batch (DAPO, arXiv 2503.14476, section 3.3)."""
    return loss_mask, loss_mask.sum()


@AGGREGATIONS.register("seq_mean_token_mean")
def seq_mean_token_mean(
    loss_mask: Tensor, documents: Tensor, n_documents: int, settings: MethodSettings
) -> tuple[Tensor, Tensor]:
    """Mean over each answer's tokens, then over answers (DeepSeekMath, arXiv 2402.03300, equation 3).

    Answers without a loss token do not count.
    """
    counts = sums_by_document(loss_mask, documents, n_documents)
    return loss_mask / counts.clamp(min=1)[documents], (counts > 0).sum()


@AGGREGATIONS.register("seq_mean_token_sum")
def seq_mean_token_sum(
    loss_mask: Tensor, documents: Tensor, n_documents: int, settings: MethodSettings
) -> tuple[Tensor, Tensor]:
    """Sum over an answer's tokens, mean over answers: the policy gradient, not normalized by length."""
    counts = sums_by_document(loss_mask, documents, n_documents)
    return loss_mask, (counts > 0).sum()


class DrGRPOAggregation(MethodSettings):
    """Settings of aggregation `dr_grpo`."""

    max_tokens: int | None = Field(None, ge=1, description="divisor in tokens; null: gconfig.max_new_tokens")


@AGGREGATIONS.register("dr_grpo")
def dr_grpo(
    loss_mask: Tensor, documents: Tensor, n_documents: int, settings: DrGRPOAggregation
) -> tuple[Tensor, Tensor]:
    """Sum over tokens / generation limit, mean over answers (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
    weights, units = seq_mean_token_sum(loss_mask, documents, n_documents, settings)
    assert settings.max_tokens is not None, "RLConfig.resolve sets it"
    return weights / settings.max_tokens, units


def count_units(loss_mask: Tensor, settings: MethodSettings) -> float:
    """Return the number of units of the rows with `loss_mask` [B, S]."""
    if not loss_mask.numel():
        return 0.0
    rows = torch.arange(len(loss_mask)).repeat_interleave(loss_mask.shape[1])
    return float(AGGREGATIONS[settings.kind](loss_mask.flatten().double(), rows, len(loss_mask), settings)[1])
