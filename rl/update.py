"""Policy update: advantages of a batch of trajectories, then optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from archon.engine.batch import STRUCTURE, PackedBatch, add_fields, pack, select, unpack
from archon.engine.engine import ArchonEngine
from archon.engine.reference import Reference
from archon.generation.seeds import derive_seed
from archon.models.layers.routed_experts import FIELD
from archon.parallel.comm import Group, all_reduce
from archon.rl.algorithms.advantages import ADVANTAGES, AdvantageInputs, overlong_penalty
from archon.rl.algorithms.config import AlgorithmConfig
from archon.rl.algorithms.corrections import CORRECTIONS
from archon.rl.algorithms.covariance import CovarianceLoss, select_tokens
from archon.rl.algorithms.kl import kl_estimate
from archon.rl.algorithms.losses import M2POLoss, second_moment_mask
from archon.rl.algorithms.mixed import MixedLoss, mixing_weights
from archon.rl.algorithms.objective import PolicyObjective, ValueObjective
from archon.rl.algorithms.steps import Step, split_steps
from archon.rl.demonstrations import add_demonstrations
from archon.rl.logprob_check import mean_logprob_difference
from archon.rl.rewards.result import REWARD_PART
from archon.schema.errors import RolloutError
from archon.training.batch_sharding import score_sharded, shard_indices

Batch = dict[str, Any]
"""Tensors [B, …] and lists of length B."""
TRAINED_FIELDS = ("input_ids", "attention_mask", "loss_mask", "logprobs")
OVERLONG_PART = "overlong"
"""Name of the overlong penalty among the parts of a reward."""
OPTIONAL_FIELDS = ("temperatures", "images")
"""Optional fields for every model; only the policy gets `routed_experts`."""


@dataclass(eq=False)
class PolicyUpdate:
    """Advantages and optimizer steps for batches of trajectories.

    Every process has the whole batch, and scores and trains its shard of the documents. The documents of a step are
    packed once, for all models and optimizer steps.

    Attributes:
        engine: the policy; it routes tokens to the experts in `routed_experts` if a batch has them.
        reference: reference model of the KL term, if `kl.coef` is positive.
        algorithm: the objective.
        temperature: sampling temperature, unless the batch has `temperatures`.
        critic: estimates returns, if the advantage needs one.
        teacher: returns logprobs [B, S] of the trained tokens, if the advantage needs one.
        max_new_tokens: limit of an answer, for the overlong penalty.
        seed: seeds the minibatch order and the shuffled-rewards control.
        shuffle_rewards: permute the rewards over the batch: nothing can be learned.
    """

    engine: ArchonEngine
    reference: Reference | None
    algorithm: AlgorithmConfig
    _: KW_ONLY
    temperature: float
    critic: ArchonEngine | None = None
    teacher: Callable[[Batch], Tensor] | None = None
    max_new_tokens: int = 1
    seed: int = 0
    shuffle_rewards: bool = False

    def __post_init__(self) -> None:
        self._objective = PolicyObjective(self.algorithm)
        self._value_objective = ValueObjective(self.algorithm)
        self._packed: tuple[Batch, PackedBatch] | None = None  # the last documents and their pack

    def logprob_difference(self, trajectories: Mapping[str, Any]) -> float:
        """Return mean |log π_trainer − log π_generator| over the loss tokens of a new batch."""
        logprobs = self._logprobs(self.engine, trajectories)
        return mean_logprob_difference(logprobs, trajectories["logprobs"], trajectories["loss_mask"])

    def prepare(self, trajectories: Mapping[str, Any], step: int) -> tuple[Batch, dict[str, float]]:
        """Return all inputs of the optimizer steps, computed before the first step, and metrics.

        Args:
            trajectories: [B, S] and [B] tensors as in `RolloutBatch`.
            step: the trainer's step, which seeds the shuffling control.

        Returns:
            The tokens with `advantages` [B, S] and the objective's other columns, in the order of `trajectories`.
        """
        # 1. Score the tokens with reference, policy, teacher and critic.
        config, metrics = self.algorithm, dict[str, float]()
        batch = trained_fields(trajectories, (FIELD,))
        mask = batch["loss_mask"]
        if self.reference is not None:
            batch["ref_logprobs"] = self._logprobs(self.reference, batch)
        if config.recomputes_logprobs:
            batch["prox_logprobs"] = self._logprobs(self.engine, batch)
            batch["policy_weights"] = self._policy_weights(batch, metrics)
        if self.teacher is not None:
            documents = trained_fields(batch, ())
            batch["teacher_logprobs"] = score_sharded(self.teacher, documents, self.engine.ranks.dp, self.engine.device)
            gap = (batch[self._old_logprobs_column] - batch["teacher_logprobs"])[mask > 0]
            metrics["teacher_kl"] = gap.double().mean().item()
        if self.critic is not None:
            batch["old_values"] = self._score(self.critic, batch, self.critic.forward_batch)
        # 2. Turn rewards into advantages.
        inputs = AdvantageInputs(
            self._rewards(trajectories, step, metrics),
            trajectories["group_ids"],
            mask,
            self._token_rewards(batch),
            batch.get("old_values"),
            trajectories.get("trajectory_ids"),
            self._steps(trajectories),
            batch[self._old_logprobs_column],
            batch.get("teacher_logprobs"),
            self._reward_parts(trajectories, step) if config.advantage.needs_parts else None,
        )
        advantages = ADVANTAGES[config.advantage.kind](inputs, config.advantage)
        batch["advantages"] = advantages
        if self.critic is not None:
            batch["returns"] = advantages + batch["old_values"] * mask
            metrics["explained_variance"] = explained_variance(batch["old_values"], batch["returns"], mask)
        trained = advantages[mask > 0].double()
        if trained.numel():
            metrics |= {
                "advantage_mean": trained.mean().item(),
                "advantage_std": trained.std(correction=0).item(),
                "advantage_max": trained.abs().max().item(),
            }
        # 3. Leave truncated answers out of the loss (DAPO, arXiv 2503.14476, section 3.4: overlong filtering).
        if config.overlong.mask_truncated:
            if "truncated" not in trajectories:
                raise RolloutError(
                    "algorithm.overlong.mask_truncated is set, but the workflow returns no `truncated`, bool [n]; add "
                    "it to the trajectory, or set the option to false"
                )
            batch["loss_mask"] = torch.where(trajectories["truncated"].unsqueeze(1), 0, mask)
        # 4. Select the tokens of a covariance loss.
        if isinstance(config.policy_loss, CovarianceLoss):
            old, mask = batch[self._old_logprobs_column], batch["loss_mask"]
            draws = _generator(self.seed, step, 0)
            batch["selected_tokens"] = select_tokens(advantages, old, mask, config.policy_loss, draws)
            metrics["selected_fraction"] = int(batch["selected_tokens"].sum()) / max(int((mask > 0).sum()), 1)
        return batch, metrics

    def mix(self, batch: Batch, demonstrations: Mapping[str, Any], step: int) -> tuple[Batch, dict[str, float]]:
        """Append demonstrations to a prepared batch, weighted for `step`; return batch and metrics."""
        settings = self.algorithm.policy_loss
        assert isinstance(settings, MixedLoss)

        def score(column: str, rows: Mapping[str, Any]) -> Tensor:
            model = self.reference if column == "ref_logprobs" else self.engine
            assert model is not None
            return self._logprobs(model, rows)

        mixed, mu = add_demonstrations(batch, demonstrations, score), settings.weight_at(step)
        is_demonstration = mixed["demonstrations"].any(1)
        weights = mixing_weights(mixed["loss_mask"], is_demonstration, mu, self.algorithm.aggregation).unsqueeze(1)
        mixed["policy_weights"] = mixed.get("policy_weights", torch.ones_like(mixed["advantages"])) * weights
        return mixed, {"demonstrations": float(is_demonstration.sum()), "demonstrations_weight": mu}

    def train(self, batch: Mapping[str, Any], step: int) -> dict[str, float]:
        """Run `ppo_epochs` passes of `minibatches` optimizer steps each.

        Args:
            batch: the result of `prepare`, with at least one trained token. Rows without one are left out.
            step: the trainer's step, which seeds the order of minibatches.

        Returns:
            Means of engine and objective metrics over the optimizer steps. `first_logprob_diff` is the mean |Δ logprob|
            between trainer and generator before the first step; on-policy it is rounding only.
        """
        results, packed = [], self._pack(batch)
        trained = batch["loss_mask"].any(1).nonzero().flatten().tolist()
        for minibatch in self._minibatches(len(trained), step):
            rows = [trained[row] for row in minibatch]
            shard, _ = _shard(packed, rows, self.engine.ranks.dp)
            objective = self._objective_of(batch, rows)
            metrics = self.engine.train_batch(shard, objective, objective.units, self.temperature)
            self.engine.step_lr_scheduler()
            if self.critic is not None:
                critic_shard = replace(shard, routed_experts=None)
                critic_metrics = self.critic.train_batch(
                    critic_shard, self._value_objective, self._value_objective.units
                )
                self.critic.step_lr_scheduler()
                metrics |= {name: critic_metrics[name] for name in ("value_loss", "value", "value_clip_fraction")}
                metrics |= {f"critic_{name}": critic_metrics[name] for name in ("grad_norm", "lr", "skipped")}
            results.append(metrics)
        self._packed = None
        means = {name: sum(r[name] for r in results) / len(results) for name in results[0]}
        return means | {"first_logprob_diff": results[0]["logprob_diff"]}

    def _objective_of(self, batch: Mapping[str, Any], rows: Sequence[int]) -> Any:
        """Return the objective of the minibatch with these rows of a prepared batch."""
        return self._objective

    def _rewards(self, trajectories: Mapping[str, Any], step: int, metrics: dict[str, float]) -> Tensor:
        """Return the rewards, float [B], after overlong penalty, transform and the shuffling control."""
        rewards = trajectories["rewards"]
        if self.algorithm.overlong.penalty > 0:
            penalty = self._overlong_penalty(trajectories)
            metrics["overlong_fraction"] = (penalty < 0).double().mean().item()
            rewards = rewards + penalty
        return self._shuffled(self.algorithm.rewards.transform(rewards), step)

    def _reward_parts(self, trajectories: Mapping[str, Any], step: int) -> dict[str, Tensor]:
        """Return the parts of the rewards by name, float [B]; the overlong penalty is a part of its own."""
        parts = {
            name.removeprefix(REWARD_PART): self._shuffled(part, step)
            for name, part in trajectories.items()
            if name.startswith(REWARD_PART)
        }
        if parts and self.algorithm.overlong.penalty > 0:
            if OVERLONG_PART in parts:
                raise RolloutError(
                    f"the reward has a part named {OVERLONG_PART!r}, which is the name of the overlong penalty; rename "
                    "it, or set algorithm.overlong.penalty=0"
                )
            parts[OVERLONG_PART] = self._shuffled(self._overlong_penalty(trajectories), step)
        return parts

    def _overlong_penalty(self, trajectories: Mapping[str, Any]) -> Tensor:
        """Return the weighted overlong penalty, float [B], at most 0."""
        overlong, rewards = self.algorithm.overlong, trajectories["rewards"]
        buffer = round(overlong.buffer * self.max_new_tokens)
        penalty = overlong_penalty(trajectories["loss_mask"].sum(1), self.max_new_tokens, buffer)
        return overlong.penalty * penalty.to(rewards.dtype)

    def _shuffled(self, rewards: Tensor, step: int) -> Tensor:
        """Return the rewards, permuted over the batch if the shuffling control is on."""
        if not self.shuffle_rewards:
            return rewards
        return rewards[torch.randperm(len(rewards), generator=_generator(self.seed, step, 1))]

    @property
    def _old_logprobs_column(self) -> str:
        """Column with the policy's logprobs before the update."""
        return "prox_logprobs" if self.algorithm.recomputes_logprobs else "logprobs"

    def _steps(self, trajectories: Mapping[str, Any]) -> tuple[Step, ...]:
        if not self.algorithm.advantage.needs_steps:
            return ()
        columns = {name: trajectories[name] for name in ("input_ids", "attention_mask", "loss_mask", "group_ids")}
        return split_steps(**columns, turn_ids=trajectories.get("turn_ids"))

    def _token_rewards(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return the KL penalty of each token, float [B, S]; None if it is not part of the reward."""
        config = self.algorithm
        if self.reference is None or config.kl.place != "reward":
            return None
        logprobs = batch[self._old_logprobs_column]
        penalty = config.kl.coef * kl_estimate(logprobs, batch["ref_logprobs"].to(logprobs.dtype), config.kl.kind)
        return torch.where(batch["loss_mask"] > 0, -penalty, 0.0)

    def _policy_weights(self, batch: Mapping[str, Any], metrics: dict[str, float]) -> Tensor:
        """Return per-token policy-loss weights, float [B, S], from the trainer-generator mismatch."""
        config, mask = self.algorithm, batch["loss_mask"]
        log_ratio = torch.where(mask > 0, batch["prox_logprobs"] - batch["logprobs"], 0.0)
        weights, touched = CORRECTIONS[config.correction.kind](log_ratio, mask, batch["logprobs"], config.correction)
        n_tokens = max(int(mask.sum()), 1)
        if config.correction.kind != "none":
            metrics["correction_fraction"] = int((touched & (mask > 0)).sum()) / n_tokens
            metrics["correction_weight"] = float((weights * mask).sum()) / n_tokens
        if isinstance(config.policy_loss, M2POLoss):
            kept = second_moment_mask(log_ratio, mask, config.policy_loss.max_second_moment)
            metrics["m2_masked_fraction"] = 1 - int(kept.sum()) / n_tokens
            weights = weights * kept
        return weights

    def _logprobs(self, engine: Reference, batch: Mapping[str, Any]) -> Tensor:
        def score(documents: PackedBatch) -> Tensor:
            return engine.forward_batch(documents, self.temperature, only_trained=True)

        return self._score(engine, batch, score)

    def _score(self, engine: Reference, batch: Mapping[str, Any], score: Callable[[PackedBatch], Tensor]) -> Tensor:
        """Return `score` of every document, [B, S], computed in shards over the data-parallel ranks."""
        packed, dp = self._pack(trained_fields(batch, (FIELD,))), engine.ranks.dp
        shard, is_placeholder = _shard(packed, range(packed.n_documents), dp)
        if engine is not self.engine:
            shard = replace(shard, routed_experts=None)
        shard_scores = score(shard)
        scores = shard_scores.new_zeros(packed.n_tokens)
        if not is_placeholder:
            scores[shard.source] = shard_scores
        if dp.size > 1:
            scores = all_reduce(scores.to(engine.device), dp).cpu()
        return unpack(packed, scores, batch["input_ids"].shape)

    def _pack(self, batch: Mapping[str, Any]) -> PackedBatch:
        """Pack a batch, or add its columns to the last pack if that has the same documents."""
        documents = {name: batch[name] for name in STRUCTURE if name in batch}
        if self._packed is None or not _are_same(documents, self._packed[0]):
            self._packed = documents, pack(documents)
        return add_fields(self._packed[1], batch, batch["input_ids"].shape)

    def _minibatches(self, size: int, step: int) -> Iterator[Sequence[int]]:
        count = self.algorithm.minibatches
        for epoch in range(self.algorithm.ppo_epochs):
            if count == 1:
                yield range(size)
                continue
            order = torch.randperm(size, generator=_generator(self.seed, step, 2 + epoch))
            for rows in order.chunk(min(count, size)):
                yield rows.sort().values.tolist()


def trained_fields(batch: Mapping[str, Any], extra_fields: tuple[str, ...]) -> Batch:
    """Return the columns that the engine reads, with the extra ones that the batch has."""
    optional = [name for name in (*OPTIONAL_FIELDS, *extra_fields) if name in batch]
    return {name: batch[name] for name in (*TRAINED_FIELDS, *optional)}


def _are_same(a: Batch, b: Batch) -> bool:
    """Return whether two batches have the same columns, by identity."""
    return a.keys() == b.keys() and all(a[name] is b[name] for name in a)


def _shard(packed: PackedBatch, documents: Sequence[int], dp: Group) -> tuple[PackedBatch, bool]:
    """Return this rank's part of `documents`, and whether it is only a placeholder with an all-zero loss mask."""
    rows = [documents[index] for index in shard_indices([packed.lengths[d] for d in documents], dp)]
    if rows:
        return select(packed, rows), False
    shard = select(packed, documents[:1])
    return replace(shard, fields=shard.fields | {"loss_mask": torch.zeros_like(shard["loss_mask"])}), True


def explained_variance(values: Tensor, returns: Tensor, loss_mask: Tensor) -> float:
    """Return 1 − Var(returns − values) / Var(returns) over trained tokens; 0 for constant returns."""
    trained = loss_mask > 0
    returns, errors = returns[trained].double(), (returns - values)[trained].double()
    variance = float(returns.var(correction=0)) if returns.numel() else 0.0
    return 1 - float(errors.var(correction=0)) / variance if variance > 0 else 0.0


def _generator(*parts: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(*parts))
