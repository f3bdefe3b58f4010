"""Preference training: DPO, IPO, CPO, SimPO, ORPO and reward models on pairs of answers, KTO on labeled answers.

Every loss is a function of one value per answer: its log-probability or its score. A step first computes these values
for the full batch and the derivative of the loss with respect to each value. The engine then computes the gradient of
Σ derivative × value, which equals the gradient of the loss. The two answers of a pair can therefore be in different
micro-batches and on different ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from archon.engine.batch import PackedBatch
from archon.engine.loss import Metrics, document_sums
from archon.engine.reference import Reference, open_reference
from archon.training.batch_sharding import score_sharded, shard_batch, take_rows
from archon.training.config import PreferenceConfig
from archon.training.loop import timed
from archon.training.preference_kinds import LENGTH_NORMALIZED, NLL_OF_PROMPTS
from archon.training.preference_losses import kto_loss, preference_loss
from archon.training.sft import SFTTrainer, padded_batch

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Answers:
    """Numbers of A answers; chosen and rejected ones alternate.

    Attributes:
        values: log-ratio to the reference, (mean) log-probability, or score of each answer, float64 [A].
        lengths: tokens of each answer, [A].
        nll: negative log-likelihood of each chosen answer, 0 for the rejected, float64 [A].
        nll_tokens: number of tokens in `nll`, [A].
    """

    values: Tensor
    lengths: Tensor
    nll: Tensor
    nll_tokens: Tensor

    @classmethod
    def concatenate(cls, parts: Sequence[Answers]) -> Answers:
        """Return all answers of several batches."""
        columns = zip(*((part.values, part.lengths, part.nll, part.nll_tokens) for part in parts), strict=True)
        return cls(*map(torch.cat, columns))


@dataclass(frozen=True)
class WeightedSum:
    """Engine loss function: Σ `weight` × value over the trained tokens."""

    documents_per_unit: int = 2

    needs_entropy = False

    def __call__(self, numbers: Tensor, entropy: Tensor | None, mb: PackedBatch) -> tuple[Tensor, Metrics]:
        """Return the weighted sum of per-token numbers [T], without metrics."""
        return (numbers * torch.where(mb["loss_mask"] != 0, mb["weight"].to(numbers.dtype), 0.0)).sum(), {}

    def units(self, mb: PackedBatch) -> Tensor:
        """Return the number of pairs or labeled answers with a trained token."""
        return document_sums(mb["loss_mask"].float(), mb).count_nonzero() / self.documents_per_unit


def mismatch(row: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of a row's prompt and another row's answer."""
    start, other_start = _answer_start(row), _answer_start(other)
    return {name: [*row[name][:start], *other[name][other_start:]] for name in ("input_ids", "loss_mask")}


def _answer_start(row: Mapping[str, Any]) -> int:
    mask: list[int] = row["loss_mask"]
    return mask.index(1) if 1 in mask else len(mask)


class PreferenceTrainer(SFTTrainer):
    """Trainer of policies on pairs and of reward models: `PreferenceTrainer(config).train()`.

    A reward model is a critic; its score is the value after the last token of the answer. Load an exported reward model
    with `archon.load_model(path, is_critic=True)`.
    """

    title = "preference"
    columns = ("loss", "eval/loss", "accuracy", "eval/accuracy", "margin", "grad_norm", "lr")
    config: PreferenceConfig
    config_type = PreferenceConfig

    def open(self) -> None:
        """Load the data, the model and the reference model."""
        super().open()
        ref = self.config.resolve().ref
        self.reference = None if ref is None else open_reference(self.engine, ref)

    def train_step(self) -> dict[str, float]:
        """Take an optimizer step on the next pairs."""
        seconds: dict[str, float] = {}
        self._mid_update = True
        with timed(seconds, "seconds/score"):
            rows = self.loader.next_batch()
            batch = self._pairs(rows)
            answers = self._answers(batch)
            measured, derivative = self._measure(answers, rows)
        batch["weight"] = self._token_weights(batch, answers, derivative)
        loss = WeightedSum()
        if self.config.loss == "kto":  # the mismatched answers have no gradient
            batch, loss = take_rows(batch, [*range(0, len(batch["loss_mask"]), 2)]), WeightedSum(documents_per_unit=1)
        local_batch = shard_batch(batch, self.engine.ranks.dp)
        with timed(seconds, "seconds/update"):
            metrics = self.engine.train_batch(local_batch, loss, loss.units)
            self.engine.step_lr_scheduler()
        return metrics | measured | seconds

    def evaluate(self) -> dict[str, float]:
        """Return metrics over all held-out pairs as `eval/…`; {} without held-out pairs."""
        if self.held_out is None:
            return {}
        rows, size = self.held_out[:], self.config.batch_size
        documents = self._documents(rows)
        parts = [
            self._answers(self._batch(documents[start : start + 2 * size]))
            for start in range(0, len(documents), 2 * size)
        ]
        measured, _ = self._measure(Answers.concatenate(parts), rows)
        return {f"eval/{name}": value for name, value in sorted(measured.items())}

    def _pairs(self, rows: Sequence[dict[str, Any]]) -> Batch:
        """Return the documents of the rows as a batch."""
        return self._batch(self._documents(rows))

    def _documents(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return two documents for each row: chosen and rejected answer; for KTO the answer and a mismatched one.

        A mismatched document is the row's prompt with the answer of the row before, as in TRL.
        """
        if self.config.loss == "kto":
            before = [rows[-1], *rows[:-1]]
            pairs = ((row, mismatch(row, other)) for row, other in zip(rows, before, strict=True))
            return [document for pair in pairs for document in pair]
        answers = [(row[f"{side}_ids"], row[f"{side}_loss_mask"]) for row in rows for side in ("chosen", "rejected")]
        if self.config.loss == "reward":
            # A value does not depend on its token: one more token is appended, and its value scores the full answer.
            answers = [([*ids, ids[-1]], [*[0] * len(ids), 1]) for ids, _ in answers]
        return [{"input_ids": ids, "loss_mask": mask} for ids, mask in answers]

    def _batch(self, documents: Sequence[dict[str, Any]]) -> Batch:
        """Pad the documents to a batch [2 P, S].

        `answer_mask` has the tokens of the answers; `loss_mask` adds the prompts that count for the NLL.
        """
        batch = padded_batch(documents)
        batch["answer_mask"], batch["nll_mask"] = batch["loss_mask"], torch.zeros_like(batch["loss_mask"])
        if self.config.resolved_nll_coef:
            batch["nll_mask"][::2] = batch["answer_mask"][::2]
            if self.config.loss in NLL_OF_PROMPTS:
                batch["nll_mask"][::2] = batch["attention_mask"][::2]
                batch["nll_mask"][:, 0] = 0  # the model predicts no first token
            batch["loss_mask"] = batch["answer_mask"] | batch["nll_mask"]
        return batch

    def _answers(self, batch: Batch) -> Answers:
        """Return the numbers of the answers of a batch, without gradient."""
        mask, nll_mask = batch["answer_mask"], batch["nll_mask"]
        scores = self._scores(self.engine, batch)
        values, lengths = (scores * mask).sum(1), mask.sum(1)
        if self.reference is not None:
            values = values - (self._scores(self.reference, batch) * mask).sum(1)
        if self.config.loss in LENGTH_NORMALIZED:
            values = values / lengths.clamp(min=1)
        return Answers(values, lengths, -(scores * nll_mask).sum(1), nll_mask.sum(1))

    def _measure(self, answers: Answers, rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], Tensor]:
        """Return metrics of the pairs, and the derivative [2 P] of each pair's loss with respect to its two values."""
        kind = self.config.loss
        if kind == "kto":
            return self._measure_labeled(answers, rows)
        config, values = self.config, answers.values.detach().requires_grad_()
        margin = torch.tensor([row["margin"] for row in rows]).double() if "margin" in rows[0] else None
        with torch.enable_grad():
            loss = preference_loss(
                values[::2], values[1::2], kind, config.resolved_beta, gamma=config.resolved_gamma, margin=margin
            )
            (derivative,) = torch.autograd.grad(loss.sum(), values)
        chosen, rejected = answers.values[::2], answers.values[1::2]
        means = {
            "loss": loss.detach(),
            "accuracy": (chosen > rejected).double(),
            "margin": chosen - rejected,
            "chosen": chosen,
            "rejected": rejected,
        }
        metrics = {name: value.mean().item() for name, value in means.items()}
        if config.resolved_nll_coef:
            metrics["nll"] = (answers.nll.sum() / answers.nll_tokens.sum()).item()
            metrics["loss"] += config.resolved_nll_coef * metrics["nll"]
        return metrics, derivative

    def _measure_labeled(self, answers: Answers, rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], Tensor]:
        """Return metrics of labeled answers, and the derivative [2 A], which is 0 for a mismatched answer."""
        config, labels = self.config, torch.tensor([row["label"] for row in rows])
        weights = (config.desirable_weight or 1.0, config.undesirable_weight or 1.0)
        values = answers.values[::2].detach().requires_grad_()
        mismatched = answers.values[1::2]
        with torch.enable_grad():
            loss = kto_loss(values, mismatched, labels, config.resolved_beta, *weights)
            (derivative,) = torch.autograd.grad(loss.sum(), values)
        values, kl = values.detach(), mismatched.mean().clamp(min=0)
        metrics = {
            "loss": loss.mean().item(),
            "accuracy": ((values > kl) == labels).double().mean().item(),
            "kl": kl.item(),
        }
        for name, of in (("chosen", labels), ("rejected", ~labels)):
            if of.any():
                metrics[name] = values[of].mean().item()
        return metrics, torch.stack([derivative, torch.zeros_like(derivative)], 1).flatten()

    def _token_weights(self, batch: Batch, answers: Answers, derivative: Tensor) -> Tensor:
        """Return the derivative of Σ loss over the pairs with respect to each token's number, [2 P, S]."""
        if self.config.loss in LENGTH_NORMALIZED:
            derivative = derivative / answers.lengths.clamp(min=1)
        weights = derivative.unsqueeze(1) * batch["answer_mask"]
        if not self.config.resolved_nll_coef:
            return weights
        # The NLL is a mean over the batch's tokens, and the engine divides by the number of pairs.
        n_pairs, n_tokens = len(derivative) / 2, int(answers.nll_tokens.sum())
        return weights - self.config.resolved_nll_coef * n_pairs / n_tokens * batch["nll_mask"].to(weights)

    def _scores(self, engine: Reference, batch: Batch) -> Tensor:
        """Return the log-probability of each trained token, or the score of each answer; float64 [2 P, S]."""

        def score(documents: Batch) -> Tensor:
            return engine.forward_batch(documents, only_trained=self.config.loss != "reward")

        scores = score_sharded(score, batch, engine.ranks.dp, engine.device)
        return scores.double() * batch["loss_mask"]
