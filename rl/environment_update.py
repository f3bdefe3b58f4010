"""Policy update with an algorithm and a loss weight for each environment of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from archon.engine.batch import PackedBatch
from archon.engine.loss import Metrics, document_ids
from archon.models.layers.routed_experts import FIELD
from archon.rl.algorithms.aggregation import count_units
from archon.rl.algorithms.objective import PolicyObjective
from archon.rl.config import EnvironmentConfig
from archon.rl.update import Batch, PolicyUpdate, trained_fields
from archon.training.batch_sharding import take_rows

ENVIRONMENT_IDS = "environment_ids"
"""Column [B] of a batch: the index of each row's environment among the run's."""


@dataclass(frozen=True)
class EnvironmentsObjective:
    """Sum of weighted objectives Σ_e w_e · L_e, each over the documents of its environment.

    Attributes:
        objectives: objective of each environment by its index.
        names: name of each environment.
        scales: w_e · N / U_e of each environment in the minibatch, for N trained tokens and U_e units of the objective:
            the engine divides the sum by N.
    """

    objectives: Sequence[PolicyObjective]
    names: Sequence[str]
    scales: Mapping[int, float]

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, mb: PackedBatch) -> tuple[Tensor, Metrics]:
        """Return the sum over units, with gradient, and metrics; `policy_loss` is that of each environment."""
        ids, total, metrics = mb[ENVIRONMENT_IDS][document_ids(mb)], logprobs.new_zeros(()), dict[str, Any]()
        for index, scale in self.scales.items():
            mask = torch.where(ids == index, mb["loss_mask"], 0)
            loss, measured = self.objectives[index](
                logprobs, entropy, replace(mb, fields=mb.fields | {"loss_mask": mask})
            )
            total = total + scale * loss
            metrics[f"environment/{self.names[index]}/policy_loss"] = measured.pop("policy_loss")
            for name, (value, count) in measured.items():
                before = metrics.get(name, (0.0, 0.0))
                metrics[name] = (before[0] + value, before[1] + count)
        return total, metrics

    def units(self, mb: PackedBatch) -> Tensor:
        """Return the number of trained tokens in the micro-batch."""
        return mb["loss_mask"].sum()


@dataclass(eq=False)
class EnvironmentUpdate(PolicyUpdate):
    """`PolicyUpdate` that prepares and trains the rows of each environment with the environment's algorithm.

    Batches need the column `environment_ids`. Statistics of a batch, such as those of `reinforce_pp` or `m2po`, are
    over the rows of one environment.

    Attributes:
        environments: algorithm and weight of each environment by name, complete.
    """

    _: KW_ONLY
    environments: Mapping[str, EnvironmentConfig]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._updates = {
            name: PolicyUpdate(
                self.engine,
                self.reference if environment.algorithm.kl.coef > 0 else None,
                environment.algorithm,
                temperature=self.temperature,
                max_new_tokens=self.max_new_tokens,
                seed=self.seed,
                shuffle_rewards=self.shuffle_rewards,
            )
            for name, environment in self.environments.items()
        }

    def prepare(self, trajectories: Mapping[str, Any], step: int) -> tuple[Batch, dict[str, float]]:
        """Return the inputs of the optimizer steps, prepared by environment, and metrics as `environment/NAME/…`."""
        batch, metrics, ids = trained_fields(trajectories, (FIELD,)), dict[str, float](), trajectories[ENVIRONMENT_IDS]
        own = set(batch) - {"loss_mask"}
        batch["loss_mask"] = batch["loss_mask"].clone()
        for index, (name, update) in enumerate(self._updates.items()):
            rows = (ids == index).nonzero().flatten()
            if not len(rows):
                continue
            prepared, measured = update.prepare(take_rows(trajectories, rows.tolist()), step)
            metrics |= {f"environment/{name}/{key}": value for key, value in measured.items()}
            rewards = trajectories["rewards"][rows].double()
            metrics |= {f"environment/{name}/reward": rewards.mean().item(), f"environment/{name}/samples": len(rows)}
            for column, value in prepared.items():
                if column in own:
                    continue
                if column not in batch:
                    batch[column] = value.new_zeros((len(ids), *value.shape[1:]))
                batch[column][rows] = value
        batch[ENVIRONMENT_IDS] = ids
        return batch, metrics

    def _objective_of(self, batch: Mapping[str, Any], rows: Sequence[int]) -> EnvironmentsObjective:
        """Return the objective of the minibatch with these rows."""
        mask, ids, scales = batch["loss_mask"][list(rows)], batch[ENVIRONMENT_IDS][list(rows)], dict[int, float]()
        n_tokens = float(mask.sum())
        for index, environment in enumerate(self.environments.values()):
            units = count_units(mask[ids == index], environment.algorithm.aggregation)
            if units:
                scales[index] = environment.weight * n_tokens / units
        objectives = [PolicyObjective(environment.algorithm) for environment in self.environments.values()]
        return EnvironmentsObjective(objectives, [*self.environments], scales)
