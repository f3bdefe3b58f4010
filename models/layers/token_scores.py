"""Log-probabilities, entropies and weighted cross-entropy without storing the logits [N, V].

Tiles of logits (some rows and columns) are computed, used while they are in the cache, and recomputed for the gradient
(the idea of Cut Cross-Entropy, Wijmans et al. 2024, arXiv:2411.09009, with ordinary matmuls). With l the logits over
the temperature τ, p = softmax(l), H the entropy, y the label:

    log p_y = l_y - lse(l)                  d log p_y / dl_j = [j = y] - p_j
    H = lse(l) - sum_j p_j l_j              d H / dl_j       = -p_j (log p_j + H)

If ranks shard the vocabulary (Shoeybi et al. 2019, arXiv:1909.08053, section 3), each rank computes its columns and
communicates only numbers per row: with lse_r, H_r over rank r's columns and w_r = exp(lse_r - lse),

    lse = log sum_r exp(lse_r)              H = lse - sum_r w_r (lse_r - H_r)

A soft cap c (Gemma 2, arXiv:2408.00118, section 2) replaces the products x by c tanh(x / c) before τ divides them; the
gradients above are multiplied by its derivative, 1 - tanh^2(x / c).

`archon.models.layers.logit_tiles` computes the tiles: by PyTorch operators, or by a Triton kernel on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from archon.models.layers.logit_tiles import HeadOperands, LogitOptions, logit_tiles
from archon.parallel.comm import Group


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        low: Tensor | None,
        up: Tensor | None,
        labels: Tensor,
        options: LogitOptions,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        operands = HeadOperands(hidden, weight, low, up)
        lse, label_logits, entropy = logit_tiles(operands, labels, options).scores(with_entropy)
        ctx.options = options
        ctx.save_for_backward(*operands, labels, lse, entropy)
        # An unused entropy keeps gradient None, so the cheaper backward of logprobs alone runs.
        ctx.set_materialize_grads(False)
        return (label_logits - lse).squeeze(1), None if entropy is None else entropy.squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprob_grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        *parts, labels, lse, entropy = ctx.saved_tensors
        operands = HeadOperands(*parts)
        logprob_grad = torch.zeros_like(lse) if logprob_grad is None else logprob_grad.unsqueeze(1)
        entropy_grad = None if entropy_grad is None else entropy_grad.unsqueeze(1)
        gradients = logit_tiles(operands, labels, ctx.options).gradients(
            ctx.needs_input_grad[:4], lse, entropy, logprob_grad, entropy_grad
        )
        return *operands.in_dtypes(gradients), None, None, None


class _WeightedLoss(torch.autograd.Function):
    """Loss with its gradient computed in the forward: three matmuls instead of four.

    This needs weights that are known before the forward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        low: Tensor | None,
        up: Tensor | None,
        labels: Tensor,
        weights: Tensor,
        options: LogitOptions,
    ) -> tuple[Tensor, Tensor]:
        operands = HeadOperands(hidden, weight, low, up)
        logprobs, gradients = logit_tiles(operands, labels, options).loss(
            ctx.needs_input_grad[:4], weights.unsqueeze(1)
        )
        ctx.gradients = operands.in_dtypes(gradients)
        logprobs = logprobs.squeeze(1)
        ctx.mark_non_differentiable(logprobs)
        return -(logprobs * weights).sum(), logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "backward of the weighted loss was called twice; it keeps its gradients for one call: run forward again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if g is None else g.mul_(loss_grad) for g in gradients), None, None, None


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: Tensor | float = 1.0,
    *,
    with_entropy: bool = True,
    soft_cap: float | None = None,
    group: Group | None = None,
    lora: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log p(label) [N] and the entropy [N] in nats (or None), differentiable in hidden and weight.

    Args:
        hidden: [N, D] floating point, of the weight's dtype.
        weight: [V, D].
        labels: int64 [N], each in 0 .. V - 1.
        temperature: divides the logits; a positive number, or a tensor [N].
        with_entropy: compute the entropy.
        soft_cap: bounds the logits before the temperature divides them; None for no bound.
        group: ranks with equal shards of the vocabulary's rows, in order; `weight` is this rank's shard. All ranks pass
            the same rows and labels and get the same scores; the gradient of hidden must be summed over them.
        lora: [N, r] and [V, r], whose product is added to the logits; differentiable, and sharded like hidden and
            weight.
    """
    options = LogitOptions(_inverse(temperature, hidden), soft_cap, group)
    low, up = (None, None) if lora is None else lora
    return _TokenScores.apply(hidden, weight, low, up, _local_labels(labels, weight, group), options, with_entropy)


def weighted_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    weights: Tensor,
    temperature: Tensor | float = 1.0,
    *,
    soft_cap: float | None = None,
    group: Group | None = None,
    lora: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum of -weights * log p(label), differentiable, and constant logprobs [N].

    The sum is differentiable in hidden and weight; the logprobs are not differentiable. Weights [N] are constants; the
    other arguments are as in `token_scores`.
    """
    weights = weights.detach().to(torch.promote_types(hidden.dtype, torch.float32))
    if not torch.is_grad_enabled():
        logprobs, _ = token_scores(
            hidden, weight, labels, temperature, with_entropy=False, soft_cap=soft_cap, group=group, lora=lora
        )
        return -(logprobs * weights).sum(), logprobs
    options = LogitOptions(_inverse(temperature, hidden), soft_cap, group)
    low, up = (None, None) if lora is None else lora
    return _WeightedLoss.apply(hidden, weight, low, up, _local_labels(labels, weight, group), weights, options)


def apply_soft_cap(logits: Tensor, soft_cap: float | None) -> Tensor:
    """Return soft_cap * tanh(logits / soft_cap), or the unchanged logits without a soft cap."""
    return logits if soft_cap is None else torch.tanh(logits / soft_cap) * soft_cap


def _local_labels(labels: Tensor, weight: Tensor, group: Group | None) -> Tensor:
    """Return labels relative to this rank's first row; labels of other ranks are outside 0 .. V - 1."""
    return labels if group is None else labels - group.rank * weight.shape[0]


def _inverse(temperature: Tensor | float, hidden: Tensor) -> Tensor | float:
    if not isinstance(temperature, Tensor):
        return 1.0 / float(temperature)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return temperature.detach().to(hidden.device, wide).reciprocal().unsqueeze(1)
