"""Preference training on pairs of answers: DPO, IPO and reward models.

Every loss is a function of one value per answer: its log-probability or its score. A step first computes these values
for the full batch and the derivative of the loss with respect to each value. The engine then computes the gradient of
Σ derivative × value, which equals the gradient of the loss. The two answers of a pair can therefore be in different
micro-batches and on different ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from archon.engine.batch import PackedBatch
from archon.engine.loss import Metrics, document_sums
from archon.engine.reference import Reference, open_reference
from archon.training.batch_sharding import score_sharded, shard_batch
from archon.training.config import PreferenceConfig
from archon.training.loop import timed
from archon.training.sft import SFTTrainer, padded_batch

Batch = dict[str, Tensor]


def preference_loss(margin: Tensor, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """Compute the loss of each pair [P] and its derivative with respect to the margin [P].

    Args:
        margin: [P], chosen minus rejected log-ratio to the reference, or chosen minus rejected score.
        kind: `dpo`, −log σ(β m) (Rafailov et al. 2023, arXiv 2305.18290, equation 7); `ipo`, (m − 1/(2β))² (Azar et al.
            2023, arXiv 2310.12036, equation 17); `reward`, −log σ(m) (Bradley and Terry 1952), without β.
        beta: β of dpo and ipo.
    """
    if kind == "ipo":
        difference = margin - 1 / (2 * beta)
        return difference.square(), 2 * difference
    scale = beta if kind == "dpo" else 1.0
    return -F.logsigmoid(scale * margin), -scale * torch.sigmoid(-scale * margin)


@dataclass(frozen=True)
class WeightedSum:
    """Engine loss function: Σ `weight` × value over the trained tokens."""

    needs_entropy = False

    def __call__(self, numbers: Tensor, entropy: Tensor | None, mb: PackedBatch) -> tuple[Tensor, Metrics]:
        """Return the weighted sum of per-token numbers [T], without metrics."""
        return (numbers * torch.where(mb["loss_mask"] != 0, mb["weight"].to(numbers.dtype), 0.0)).sum(), {}

    def units(self, mb: PackedBatch) -> Tensor:
        """Return the number of pairs: half of the number of answers with a trained token."""
        return document_sums(mb["loss_mask"].float(), mb).count_nonzero() / 2


class PreferenceTrainer(SFTTrainer):
    """Trainer of DPO and IPO policies and of reward models: `PreferenceTrainer(config).train()`.

    A reward model is a critic; its score is the value after the last token of the answer. Load an exported reward model
    with `archon.load_model(path, is_critic=True)`.
    """

    kind = "dpo"
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
            batch = self._pairs(self.loader.next_batch())
            measured, derivative = self._measure(batch)
        sign = torch.tensor([1.0, -1.0]).repeat(len(derivative))
        weight = derivative.repeat_interleave(2) * sign
        batch["weight"] = weight.unsqueeze(1) * batch["loss_mask"]
        local_batch = shard_batch(batch, self.engine.ranks.dp)
        loss = WeightedSum()
        with timed(seconds, "seconds/update"):
            metrics = self.engine.train_batch(local_batch, loss, loss.units)
            self.engine.step_lr_scheduler()
        return metrics | measured | seconds

    def evaluate(self) -> dict[str, float]:
        """Return metrics over all held-out pairs as `eval/…`; {} without held-out pairs."""
        if self.held_out is None:
            return {}
        sums: dict[str, float] = {}
        for start in range(0, len(self.held_out), self.config.batch_size):
            rows = self.held_out[start : start + self.config.batch_size]
            for name, value in self._measure(self._pairs(rows))[0].items():
                sums[name] = sums.get(name, 0.0) + value * len(rows)
        return {f"eval/{name}": value / len(self.held_out) for name, value in sorted(sums.items())}

    def _pairs(self, rows: Sequence[dict[str, Any]]) -> Batch:
        """Pad the answers to a batch [2 P, S]; chosen and rejected alternate."""
        answers = [(row[f"{side}_ids"], row[f"{side}_loss_mask"]) for row in rows for side in ("chosen", "rejected")]
        if self.config.loss == "reward":
            # A value does not depend on its token: one more token is appended, and its value scores the full answer.
            answers = [([*ids, ids[-1]], [*[0] * len(ids), 1]) for ids, _ in answers]
        return padded_batch([{"input_ids": ids, "loss_mask": mask} for ids, mask in answers])

    def _measure(self, batch: Batch) -> tuple[dict[str, float], Tensor]:
        """Return metrics of the pairs, and the derivative [P] of each loss with respect to its margin."""
        numbers = self._numbers(self.engine, batch)
        if self.reference is not None:
            numbers = numbers - self._numbers(self.reference, batch)
        chosen, rejected = numbers[::2], numbers[1::2]
        loss, derivative = preference_loss(chosen - rejected, self.config.loss, self.config.beta)
        means = {
            "loss": loss,
            "accuracy": (chosen > rejected).double(),
            "margin": chosen - rejected,
            "chosen": chosen,
            "rejected": rejected,
        }
        return {name: value.mean().item() for name, value in means.items()}, derivative

    def _numbers(self, engine: Reference, batch: Batch) -> Tensor:
        """Return the sum of trained log-probabilities of each answer, or its score; float64 [2 P]."""

        def score(documents: Batch) -> Tensor:
            return engine.forward_batch(documents, only_trained=self.config.loss != "reward")

        scores = score_sharded(score, batch, engine.ranks.dp, engine.device)
        return (scores.double() * batch["loss_mask"]).sum(1)
