"""The language-model head: logits, or token scores and losses that never hold [T, vocab]."""

from __future__ import annotations

from typing import NamedTuple, overload

from torch import Tensor, nn

from archon.models.layers.linear import Role
from archon.models.layers.matmul import linear
from archon.models.token_scores import token_scores, weighted_loss
from archon.parallel.comm import Group, all_gather, local
from archon.schema.errors import LayoutError

IGNORE_INDEX = -100
"""Label of a position that is not scored: logprob 0, entropy 0, no gradient."""


class TokenScores(NamedTuple):
    """Per token [T], in at least float32: log p(label) and the entropy of p in nats; 0 where the label is ignored.

    Both are differentiable. `entropy` is None where it was not asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None


class WeightedLoss(NamedTuple):
    """`loss`: the sum of -weight * log p(label), a scalar with gradient; `logprobs` [T] per token, without one."""

    loss: Tensor
    logprobs: Tensor


class _Kept:
    """The rows of [T] that count; ignored ones cost nothing since they are left out before any product."""

    def __init__(self, total: int, index: Tensor) -> None:
        self.total = total
        self.index = None if index.shape[0] == total else index

    def take(self, x: Tensor) -> Tensor:
        return x if self.index is None else x.index_select(0, self.index)

    def spread(self, values: Tensor) -> Tensor:
        """[kept] to [T], 0 elsewhere."""
        if self.index is None:
            return values
        return values.new_zeros(self.total).index_copy(0, self.index, values)


class LMHead(nn.Linear):
    """Projection to the vocabulary, weight [vocab, dim], without bias; a tied model's weight is its embedding."""

    role: Role = "head"
    tp: Group | None = None

    def __init__(self, dim: int, vocab_size: int, *, tied: bool = False) -> None:
        super().__init__(dim, vocab_size, bias=False)
        self.tied = tied
        """Whether the weight is the embedding, also where a pipeline keeps the two apart."""

    @overload
    def forward(self, hidden: Tensor) -> Tensor: ...
    @overload
    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        temperature: float | Tensor = 1.0,
        *,
        entropy: bool = True,
        rows: Tensor | None = None,
    ) -> TokenScores: ...
    @overload
    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None,
        temperature: float | Tensor,
        *,
        entropy: bool = True,
        weights: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor | TokenScores | WeightedLoss: ...
    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        *,
        entropy: bool = True,
        weights: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor | TokenScores | WeightedLoss:
        """One call for every use, since sharding wraps exactly this call.

        Args:
            hidden: [T, dim], after the final norm; under tensor parallelism this rank's share [T / tp, dim].
            labels: int64 [T], the token each position predicts, -100 for none: those rows cost nothing.
            temperature: divides the logits; a positive number, or [T].
            entropy: whether scores carry entropies, which cost three more passes over each tile.
            weights: [T]; asks for the fused weighted loss in place of scores.
            rows: int64 [n], the positions to score, where the caller knows them and that their labels are tokens of
                the vocabulary; else they are looked for and checked, for which the host waits for a GPU.

        Returns:
            Logits [T, vocab] in hidden's dtype without labels, else `TokenScores`, or `WeightedLoss` with `weights`.

        Raises ValueError for a label outside the vocabulary, for a temperature that is not positive and for weights
        without labels.
        """
        if labels is None:
            if weights is not None:
                raise ValueError("weights were given without labels; the weighted loss needs both")
            if self.tp is not None:
                raise LayoutError(
                    "under tensor parallelism the vocabulary is split and whole logits are never made; pass labels"
                )
            return linear(hidden, self.weight)
        if weights is not None:
            return self.loss_sum(hidden, labels, weights, temperature, rows)
        kept, hidden, labels, temperature = self._kept(hidden, labels, temperature, rows)
        logprobs, entropies = token_scores(
            hidden, local(self.weight), labels, temperature, with_entropy=entropy, group=self.tp
        )
        return TokenScores(kept.spread(logprobs), None if entropies is None else kept.spread(entropies))

    def loss_sum(
        self,
        hidden: Tensor,
        labels: Tensor,
        weights: Tensor,
        temperature: float | Tensor = 1.0,
        rows: Tensor | None = None,
    ) -> WeightedLoss:
        """The sum over tokens of -weight * log p(label), its gradient made in the same pass: for losses whose weights
        are known beforehand, as in cross-entropy. Arguments as in `forward`.

        Without `rows`, tokens of weight 0 cost nothing and report log-probability 0. The loss can be differentiated
        once.
        """
        if rows is None:
            labels = labels.masked_fill(weights == 0, IGNORE_INDEX)
        kept, hidden, labels, temperature = self._kept(hidden, labels, temperature, rows)
        loss, logprobs = weighted_loss(
            hidden, local(self.weight), labels, kept.take(weights), temperature, group=self.tp
        )
        return WeightedLoss(loss, kept.spread(logprobs))

    def _kept(
        self, hidden: Tensor, labels: Tensor, temperature: float | Tensor, rows: Tensor | None
    ) -> tuple[_Kept, Tensor, Tensor, float | Tensor]:
        """The rows that count."""
        if self.tp is not None:
            hidden = all_gather(hidden, self.tp)
        kept = _Kept(labels.shape[0], (labels != IGNORE_INDEX).nonzero().squeeze(1) if rows is None else rows)
        labels = kept.take(labels)
        if rows is None and labels.numel():
            low, high = (int(x) for x in labels.aminmax())
            if low < 0 or high >= self.out_features:
                raise ValueError(
                    f"labels lie in {low} .. {high}; expected 0 .. {self.out_features - 1}, or {IGNORE_INDEX} for none"
                )
        lowest = temperature
        if isinstance(temperature, Tensor):
            temperature = kept.take(temperature)
            lowest = float(temperature.min()) if temperature.numel() else 1.0
        if not lowest > 0:
            raise ValueError(f"temperature is {lowest}; expected a positive number")
        return kept, kept.take(hidden), labels, temperature
