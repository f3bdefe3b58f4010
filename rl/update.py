"""One policy update: from a batch of trajectories to optimiser steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from archon.engine import ArchonEngine
from archon.rl.algorithms.advantages import ADVANTAGES
from archon.rl.algorithms.objective import PolicyObjective
from archon.rl.config import AlgorithmConfig
from archon.rl.context import derive_seed
from archon.rl.replay import mean_logprob_difference
from archon.rl.shares import own_documents, score_shared

TRAINED_FIELDS = ("input_ids", "attention_mask", "loss_mask", "logprobs", "advantages", "ref_logprobs")


class PolicyUpdate:
    """Advantages, reference logprobs and optimiser steps for one batch at a time.

    With several processes each has the whole batch, and scores and trains its share of the documents.

    Args:
        engine: the policy.
        reference: scores the same tokens for the KL term; needed exactly when `kl_coef` is positive.
        algorithm: the objective.
        temperature: of the rollout, at which every logprob here is taken too.
        seed: of the minibatch order and of the shuffled-rewards control.
        shuffle_rewards: permute the rewards over the batch, so that nothing can be learnt.
    """

    def __init__(
        self,
        engine: ArchonEngine,
        reference: ArchonEngine | None,
        algorithm: AlgorithmConfig,
        *,
        temperature: float,
        seed: int = 0,
        shuffle_rewards: bool = False,
    ) -> None:
        self.engine = engine
        self.reference = reference
        self.algorithm = algorithm
        self.temperature = temperature
        self.seed = seed
        self.shuffle_rewards = shuffle_rewards
        self._objective = PolicyObjective(algorithm)

    def logprob_difference(self, trajectories: Mapping[str, Tensor]) -> float:
        """Mean |log π_trainer − log π_generator| over the loss tokens of a batch that was just generated."""
        logprobs = self._logprobs(self.engine, _fields(trajectories))
        return mean_logprob_difference(logprobs, trajectories["logprobs"], trajectories["loss_mask"])

    def advantages(self, trajectories: Mapping[str, Tensor], step: int) -> Tensor:
        """One number a trajectory, float [B]; from permuted rewards under the shuffled-rewards control."""
        rewards = trajectories["rewards"]
        if self.shuffle_rewards:
            rewards = rewards[torch.randperm(len(rewards), generator=_generator(self.seed, step, 1))]
        return ADVANTAGES[self.algorithm.advantage](rewards, trajectories["group_ids"], self.algorithm)

    def train(self, trajectories: Mapping[str, Tensor], advantages: Tensor, step: int) -> dict[str, float]:
        """`ppo_epochs` passes of `minibatches` optimiser steps each; metrics are means over those steps.

        Args:
            trajectories: [B, S] and [B] tensors as `RolloutBatch` has them.
            advantages: [B].
            step: the trainer's step, from which the order of minibatches derives.

        Returns:
            The engine's and the objective's metrics, and `first_logprob_diff`: mean |Δ logprob| between trainer and
            generator before the first optimiser step, which should stay at rounding.
        """
        batch = self._prepare(trajectories, advantages)
        results = []
        for minibatch in self._minibatches(batch, step):
            own = own_documents(minibatch, self.engine.ranks.dp)
            results.append(self.engine.train_batch(own, self._objective, self._objective.units, self.temperature))
            self.engine.step_lr_scheduler()
        means = {name: sum(r[name] for r in results) / len(results) for name in results[0]}
        return means | {"first_logprob_diff": results[0]["logprob_diff"]}

    def _prepare(self, trajectories: Mapping[str, Tensor], advantages: Tensor) -> dict[str, Tensor]:
        batch = dict(trajectories) | {"advantages": advantages.unsqueeze(1) * trajectories["loss_mask"]}
        # Answers of one length next to each other: attention then runs them as one batch. The objective is a sum over
        # documents, so their order is free.
        order = trajectories["attention_mask"].sum(1).argsort(stable=True)
        batch = {name: batch[name][order] for name in TRAINED_FIELDS if name in batch}
        if self.reference is not None:
            batch["ref_logprobs"] = self._logprobs(self.reference, batch)
        return batch

    def _logprobs(self, engine: ArchonEngine, batch: Mapping[str, Tensor]) -> Tensor:
        def score(documents: dict[str, Tensor]) -> Tensor:
            return engine.forward_batch(documents, self.temperature, only_trained=True)

        return score_shared(score, batch, engine.ranks.dp, engine.device)

    def _minibatches(self, batch: Mapping[str, Tensor], step: int) -> Iterator[dict[str, Tensor]]:
        size, count = len(batch["input_ids"]), self.algorithm.minibatches
        for epoch in range(self.algorithm.ppo_epochs):
            if count == 1:
                yield dict(batch)
                continue
            order = torch.randperm(size, generator=_generator(self.seed, step, 2 + epoch))
            for rows in order.chunk(min(count, size)):
                yield {name: value[rows.sort().values] for name, value in batch.items()}


def _fields(trajectories: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: trajectories[name] for name in TRAINED_FIELDS if name in trajectories}


def _generator(*parts: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(*parts))
