"""From per-token losses to one number: which tokens weigh how much, and what the sum is divided by.

Each kind is a pair (weight of every token, number of units). The engine sums weight · loss over all micro-batches and
ranks and divides by the total number of units, so that neither packing nor the micro-batch split can change the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from archon.rl.algorithms.registry import Registry

if TYPE_CHECKING:
    from archon.rl.algorithms.config import AlgorithmConfig

# (loss_mask [T] float, document_ids [T] int, number of documents, configuration) -> (token weights [T], units [])
AggregationFn = Callable[[Tensor, Tensor, int, "AlgorithmConfig"], tuple[Tensor, Tensor]]
AGGREGATIONS: Registry[AggregationFn] = Registry("aggregation")


def sums_by_document(values: Tensor, documents: Tensor, n_documents: int) -> Tensor:
    """[n_documents]: the sum over each document; of a loss mask how many loss tokens it has."""
    return values.new_zeros(n_documents).index_add(0, documents, values)


@AGGREGATIONS.register("token_mean")
def token_mean(
    loss_mask: Tensor, documents: Tensor, n_documents: int, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """Every loss token of the global batch weighs the same (DAPO, arXiv 2503.14476, section 3.3)."""
    return loss_mask, loss_mask.sum()


@AGGREGATIONS.register("seq_mean_token_mean")
def seq_mean_token_mean(
    loss_mask: Tensor, documents: Tensor, n_documents: int, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """Mean over an answer's own tokens, then over answers (DeepSeekMath, arXiv 2402.03300, equation 3).

    An answer without a loss token is no answer and is not counted.
    """
    counts = sums_by_document(loss_mask, documents, n_documents)
    return loss_mask / counts.clamp(min=1)[documents], (counts > 0).sum()


@AGGREGATIONS.register("seq_mean_token_sum")
def seq_mean_token_sum(
    loss_mask: Tensor, documents: Tensor, n_documents: int, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """Sum over an answer's tokens, mean over answers: the policy gradient of the whole answer, no length in it."""
    counts = sums_by_document(loss_mask, documents, n_documents)
    return loss_mask, (counts > 0).sum()


@AGGREGATIONS.register("dr_grpo")
def dr_grpo(loss_mask: Tensor, documents: Tensor, n_documents: int, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Sum over an answer's tokens divided by the limit of generation, the same for every answer, mean over answers
    (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
    weights, units = seq_mean_token_sum(loss_mask, documents, n_documents, config)
    assert config.length_budget is not None, "the run's configuration fills it"
    return weights / config.length_budget, units
