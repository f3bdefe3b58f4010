"""Training on pairs of answers: direct preference optimisation, and reward models.

Both losses are functions of one number an answer: its log-probability, or its score. Each step first computes these for
the whole batch, then the derivative of the loss by each of them, and then lets the engine take the gradient of the sum
of derivative × number. That is the gradient of the loss, and the two answers of a pair need not lie in one micro-batch
or on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from archon.engine.batch import PackedBatch
from archon.engine.engine import ArchonEngine
from archon.engine.loss import Metrics, document_sums
from archon.training.config import PreferenceConfig
from archon.training.loop import timed
from archon.training.sft import SFTTrainer, padded_batch
from archon.training.sharding import score_sharded, shard_batch

Batch = dict[str, Tensor]


def preference_loss(margin: Tensor, kind: str, beta: float) -> tuple[Tensor, Tensor]:
    """Returns the loss of each pair [P] and its derivative by the margin [P].

    Args:
        margin: by how much the preferred answer leads, [P]: its log-ratio to the reference less the other's, or its
            score less the other's.
        kind: `dpo`, −log σ(β m) (Rafailov et al. 2023, arXiv 2305.18290, equation 7); `ipo`, (m − 1/(2β))² (Azar et al.
            2023, arXiv 2310.12036, equation 17); `reward`, −log σ(m) (Bradley and Terry 1952), without β.
    """
    if kind == "ipo":
        ahead = margin - 1 / (2 * beta)
        return ahead.square(), 2 * ahead
    scale = beta if kind == "dpo" else 1.0
    return -F.logsigmoid(scale * margin), -scale * torch.sigmoid(-scale * margin)


@dataclass(frozen=True)
class WeightedSum:
    """Σ `weight` × number over the trained tokens: the loss that the engine takes the gradient of."""

    needs_entropy = False

    def __call__(self, numbers: Tensor, entropy: Tensor | None, mb: PackedBatch) -> tuple[Tensor, Metrics]:
        return (numbers * torch.where(mb["loss_mask"] != 0, mb["weight"].to(numbers.dtype), 0.0)).sum(), {}

    def units(self, mb: PackedBatch) -> Tensor:
        """Returns the number of pairs: each answer with a trained token is half of one."""
        return document_sums(mb["loss_mask"].float(), mb).count_nonzero() / 2


class PreferenceTrainer(SFTTrainer):
    """Trains a policy by DPO or IPO, or a reward model, on pairs. `PreferenceTrainer(config).train()` is the whole run.

    A reward model is a critic whose score is read after the answer's last token. It is exported like any model, and
    `archon.load_model(path, is_critic=True)` loads it.
    """

    kind = "dpo"
    title = "preference"
    columns = ("loss", "eval/loss", "accuracy", "eval/accuracy", "margin", "grad_norm", "lr")
    config: PreferenceConfig

    def open(self) -> None:
        super().open()
        self.reference = None
        if (ref := self.config.resolve().ref) is not None:
            self.reference = ArchonEngine(ref)
            self.reference.initialize()
        self._sum = WeightedSum()

    def train_step(self) -> dict[str, float]:
        """One optimiser step on the next pairs."""
        seconds: dict[str, float] = {}
        self._mid_update = True
        with timed(seconds, "score"):
            batch = self._pairs(self.loader.next_batch())
            measured, derivative = self._measure(batch)
        sign = torch.tensor([1.0, -1.0]).repeat(len(derivative))
        weight = derivative.repeat_interleave(2) * sign
        batch["weight"] = weight.unsqueeze(1) * batch["loss_mask"]
        own = shard_batch(batch, self.engine.ranks.dp)
        with timed(seconds, "update"):
            metrics = self.engine.train_batch(own, self._sum, self._sum.units)
            self.engine.step_lr_scheduler()
        return metrics | measured | {f"seconds/{name}": value for name, value in seconds.items()}

    def evaluate(self) -> dict[str, float]:
        """Returns the same metrics over all held-out pairs, as `eval/…`; {} without any."""
        if self.held_out is None:
            return {}
        sums: dict[str, float] = {}
        for start in range(0, len(self.held_out), self.config.batch_size):
            rows = self.held_out[start : start + self.config.batch_size]
            for name, value in self._measure(self._pairs(rows))[0].items():
                sums[name] = sums.get(name, 0.0) + value * len(rows)
        return {f"eval/{name}": value / len(self.held_out) for name, value in sorted(sums.items())}

    def _pairs(self, rows: Sequence[dict[str, Any]]) -> Batch:
        """Returns the answers as a padded batch [2 P, S], chosen and rejected of each pair in turn."""
        answers = chain.from_iterable(
            [
                {"input_ids": row[f"{side}_ids"], "loss_mask": row[f"{side}_loss_mask"]}
                for side in ("chosen", "rejected")
            ]
            for row in rows
        )
        if self.config.loss != "reward":
            return padded_batch(list(answers), sort=False)
        # A value is of what precedes its token: one more token gives the value of the whole answer.
        extended = [
            {
                "input_ids": [*answer["input_ids"], answer["input_ids"][-1]],
                "loss_mask": [*[0] * len(answer["input_ids"]), 1],
            }
            for answer in answers
        ]
        return padded_batch(extended, sort=False)

    def _measure(self, batch: Batch) -> tuple[dict[str, float], Tensor]:
        """Returns metrics of the pairs, and the derivative of each one's loss by its margin, [P]."""
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

    def _numbers(self, engine: ArchonEngine, batch: Batch) -> Tensor:
        """Returns each answer's sum of trained tokens' log-probabilities, or its score; float64 [2 P]."""

        def score(documents: Batch) -> Tensor:
            return engine.forward_batch(documents, only_trained=self.config.loss != "reward")

        scores = score_sharded(score, batch, engine.ranks.dp, engine.device)
        return (scores.double() * batch["loss_mask"]).sum(1)
