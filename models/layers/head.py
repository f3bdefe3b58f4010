"""The language-model head: logits, or token scores and losses computed without materializing [T, vocab]."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from archon.models.layers.linear import Role
from archon.models.layers.matmul import linear
from archon.models.layers.token_scores import apply_soft_cap, token_scores, weighted_loss
from archon.models.lora.layers import LoRALayer
from archon.parallel.comm import Group, all_gather, local
from archon.schema.errors import LayoutError

IGNORE_INDEX = -100
"""Label of a position that is not scored: logprob 0, entropy 0, no gradient."""


class TokenScores(NamedTuple):
    """Per-token log p(label) and entropy of p in nats, [T] in at least float32; 0 for ignored labels.

    Both are differentiable. `entropy` is None if it was not requested.
    """

    logprobs: Tensor
    entropy: Tensor | None


class WeightedLoss(NamedTuple):
    """Sum of -weight * log p(label), a differentiable scalar, and constant logprobs [T]."""

    loss: Tensor
    logprobs: Tensor


class _RowSelection:
    """Select the n scored rows of [T], so that the matmuls skip ignored rows."""

    def __init__(self, total: int, index: Tensor) -> None:
        self.total, self.index = total, index

    def select(self, x: Tensor) -> Tensor:
        return x if len(self.index) == self.total else x.index_select(0, self.index)

    def scatter(self, values: Tensor) -> Tensor:
        """Return `values` [n] of the selected rows as [T], 0 elsewhere."""
        if len(self.index) == self.total:
            return values
        return values.new_zeros(self.total).index_copy(0, self.index, values)


class LMHead(nn.Linear):
    """Projection to the vocabulary, weight [vocab, dim], without bias.

    Attributes:
        tied: the weight is the embedding's, or a copy of it in the last pipeline stage.
        soft_cap: bounds the logits to soft_cap * tanh(logits / soft_cap); None for no bound.
        lora: the LoRA of the weight.
    """

    role: Role = "head"
    tp: Group | None = None

    def __init__(self, dim: int, vocab_size: int, *, tied: bool = False, soft_cap: float | None = None) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.tied, self.soft_cap = tied, soft_cap
        self.lora: LoRALayer | None = None

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        *,
        entropy: bool = True,
        weights: Tensor | None = None,
        rows: Tensor | None = None,
        token_rows: Tensor | None = None,
        detached: bool = False,
    ) -> Tensor | TokenScores | WeightedLoss:
        """Return logits [T, vocab], `TokenScores` with labels, or `WeightedLoss` with labels and weights.

        This is one method, because FSDP hooks wrap `forward`.

        Args:
            hidden: [T, dim], after the final norm; this rank's shard [T / tp, dim] under tensor parallelism.
            labels: int64 [T], the token that each position predicts, -100 for rows that are not scored.
            temperature: divides the logits; a positive number, or [T].
            entropy: compute entropies too, which takes three more passes over each tile.
            weights: [T], known before the forward, as for cross-entropy; compute the weighted loss and its gradient in
                one pass instead of scores. Without `rows`, tokens of weight 0 are not scored and have logprob 0.
                `backward` can be called once.
            rows: int64 [n], positions to score, with valid labels and temperatures. By default this method finds and
                checks them, which makes the host wait for the GPU.
            token_rows: int64 [T], the row of hidden (over all tensor-parallel ranks) that predicts each label; row t by
                default. Documents with a shared prefix share rows.
            detached: compute scores or the loss without a gradient of the weight.

        Raises:
            ValueError: a label is outside the vocabulary, a temperature is not positive, or labels are missing.
            LayoutError: logits were requested under tensor parallelism.
        """
        if labels is None:
            if weights is not None:
                raise ValueError("weights without labels: expected both, or neither; pass labels too")
            if self.tp is not None:
                raise LayoutError(
                    "labels are None; under tensor parallelism full logits are never computed: pass labels"
                )
            return self.finish_logits(linear(hidden, self.weight), hidden)
        if weights is not None and rows is None:
            labels = labels.masked_fill(weights == 0, IGNORE_INDEX)
        selected, hidden, labels, temperature = self._select_rows(hidden, labels, temperature, rows, token_rows)
        matrix = local(self.weight.detach() if detached else self.weight)
        options: dict[str, Any] = {"soft_cap": self.soft_cap, "group": self.tp, "lora": self._lora_operands(hidden)}
        if weights is not None:
            weights = selected.select(weights)
            loss, logprobs = weighted_loss(hidden, matrix, labels, weights, temperature, **options)
            return WeightedLoss(loss, selected.scatter(logprobs))
        logprobs, entropies = token_scores(hidden, matrix, labels, temperature, with_entropy=entropy, **options)
        return TokenScores(selected.scatter(logprobs), None if entropies is None else selected.scatter(entropies))

    def finish_logits(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """Return products [T, vocab] of hidden [T, dim] and the weight with the LoRA's term and the soft cap."""
        if (lora := self._lora_operands(hidden)) is not None:
            logits = torch.addmm(logits, lora[0], lora[1].t())
        return apply_soft_cap(logits, self.soft_cap)

    def _lora_operands(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return scale * hidden a^T [T, r] and this rank's rows of b [vocab, r], if the LoRA is enabled."""
        if self.lora is None or not self.lora.enabled:
            return None
        a, b = self.lora.parts(hidden.dtype)
        return linear(hidden, a) * self.lora.scale, b

    def _select_rows(
        self,
        hidden: Tensor,
        labels: Tensor,
        temperature: float | Tensor,
        rows: Tensor | None,
        token_rows: Tensor | None,
    ) -> tuple[_RowSelection, Tensor, Tensor, float | Tensor]:
        """Return the selection of scored rows, and hidden, labels and temperature of these rows."""
        if self.tp is not None:
            hidden = all_gather(hidden, self.tp)
        selected = _RowSelection(
            labels.shape[0], (labels != IGNORE_INDEX).nonzero().squeeze(1) if rows is None else rows
        )
        labels = selected.select(labels)
        if rows is None and labels.numel():
            low, high = (int(x) for x in labels.aminmax())
            if low < 0 or high >= self.out_features:
                raise ValueError(
                    f"labels range from {low} to {high}; expected 0 to {self.out_features - 1}, or {IGNORE_INDEX} for "
                    "tokens that are not scored"
                )
        lowest = temperature
        if isinstance(temperature, Tensor):
            temperature = selected.select(temperature)
            lowest = float(temperature.min()) if rows is None and temperature.numel() else 1.0
        if not lowest > 0:
            raise ValueError(f"temperature is {lowest}; expected a positive number")
        if token_rows is None:
            return selected, selected.select(hidden), labels, temperature
        return selected, hidden.index_select(0, selected.select(token_rows)), labels, temperature
