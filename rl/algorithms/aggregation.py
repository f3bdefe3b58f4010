"""From per-token losses to one number: which tokens weigh how much, and what the sum is divided by.

Each kind is a pair (weight of every token, number of units). The engine sums weight · loss over all micro-batches and
ranks and divides by the total number of units, so that neither packing nor the micro-batch split can change the result.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from archon.rl.algorithms.registry import Registry

# (loss_mask [T] float, document_ids [T] int, number of documents) -> (token weights [T], units [])
AggregationFn = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
AGGREGATIONS: Registry[AggregationFn] = Registry("aggregation")


def tokens_by_document(loss_mask: Tensor, documents: Tensor, n_documents: int) -> Tensor:
    """[n_documents]: how many loss tokens each document has."""
    return loss_mask.new_zeros(n_documents).index_add(0, documents, loss_mask)


@AGGREGATIONS.register("token_mean")
def token_mean(loss_mask: Tensor, documents: Tensor, n_documents: int) -> tuple[Tensor, Tensor]:
    """Every loss token of the global batch weighs the same (DAPO, arXiv 2503.14476, section 3.3)."""
    return loss_mask, loss_mask.sum()


@AGGREGATIONS.register("seq_mean_token_mean")
def seq_mean_token_mean(loss_mask: Tensor, documents: Tensor, n_documents: int) -> tuple[Tensor, Tensor]:
    """Mean over an answer's own tokens, then over answers (DeepSeekMath, arXiv 2402.03300, equation 3).

    An answer without a loss token is no answer and is not counted.
    """
    counts = tokens_by_document(loss_mask, documents, n_documents)
    return loss_mask / counts.clamp(min=1)[documents], (counts > 0).sum()


@AGGREGATIONS.register("seq_mean_token_sum")
def seq_mean_token_sum(loss_mask: Tensor, documents: Tensor, n_documents: int) -> tuple[Tensor, Tensor]:
    """Sum over an answer's tokens, mean over answers: the policy gradient of the whole answer, no length in it."""
    counts = tokens_by_document(loss_mask, documents, n_documents)
    return loss_mask, (counts > 0).sum()
