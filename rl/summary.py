"""What a step of RL writes down: numbers about a batch, and a few of its trajectories in full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from archon.rl.rewards.result import FAILURE_KINDS
from archon.rl.rollout import RolloutBatch
from archon.rl.trajectories import trajectory_ids
from archon.training.metrics import TrajectoryWriter, read_jsonl

WARN_AFTER_STEPS = (10, 100, 1000)
"""Steps in a row of zero-variance groups alone after which the run warns; of groups of one, after the first too."""

# Present in every step, so that a step without a failure is a 0 in the series and not a gap.
NO_FAILURES = {f"rollout/dropped/reward_{kind}": 0.0 for kind in FAILURE_KINDS}


def batch_metrics(batch: RolloutBatch, version: int) -> dict[str, float]:
    """Returns numbers about the batch's samples, what workflows recorded, and every count as `rollout/<name>`.

    Args:
        batch: of one step.
        version: of the trainer's weights, to which `staleness_…` is measured.
    """
    metrics: dict[str, float] = {}
    if batch:
        rewards = batch.trajectories["rewards"].double()
        metrics = {
            "reward": rewards.mean().item(),
            "reward_std": rewards.std(correction=0).item(),
            "length": batch.trajectories["loss_mask"].sum(1).double().mean().item(),
            "samples": float(len(rewards)),
            "groups": float(len(batch.prompts)),
            **staleness(batch.trajectories["versions"], batch.trajectories["loss_mask"], version),
        }
        if "truncated" in batch.trajectories:
            metrics["truncated"] = batch.trajectories["truncated"].double().mean().item()
    if generated := batch if batch else batch.dropped:
        metrics["group_size"] = len(trajectory_ids(generated.trajectories).unique()) / len(generated.prompts)
    if (n_groups := groups_generated(batch)) > 0:
        metrics["zero_variance_fraction"] = batch.counts["zero_variance_groups"] / n_groups
    return metrics | batch.numbers | NO_FAILURES | {f"rollout/{name}": float(n) for name, n in batch.counts.items()}


class ZeroVarianceMonitor:
    """Warns where step after step no group has two answers of different rewards."""

    def __init__(self) -> None:
        self._steps = 0  # in a row

    def observe(self, metrics: Mapping[str, float]) -> str | None:
        """Returns a warning to log after a step with these metrics (those of `batch_metrics`), or None."""
        alike = metrics.get("rollout/zero_variance_groups", 0.0)
        alone = metrics.get("group_size") == 1.0
        self._steps = self._steps + 1 if alone or (alike and alike == metrics["rollout/episodes"]) else 0
        if alone and self._steps in (1, *WARN_AFTER_STEPS):
            return (
                "each group is one trajectory, whose advantage over its group is 0, so that nothing is learned; return "
                "gconfig.n_samples trajectories a prompt, or one, with returns_group = False on the workflow's class"
            )
        if self._steps not in WARN_AFTER_STEPS:
            return None
        return (
            f"for {self._steps} steps all answers of a group have had the same reward, so that nothing is learned; "
            "look at the reward function, gconfig.n_samples and gconfig.temperature"
        )


def staleness(versions: Tensor, loss_mask: Tensor, version: int) -> dict[str, float]:
    """Returns mean and maximum, over the trained tokens, of the updates between the weights that sampled and `version`.

    Tokens of unknown version (−1) are left out; {} where no other is left.
    """
    behind = version - versions[(loss_mask != 0) & (versions >= 0)]
    if not behind.numel():
        return {}
    return {"staleness_mean": behind.double().mean().item(), "staleness_max": float(behind.max())}


def groups_generated(batch: RolloutBatch) -> int:
    """Returns how many episodes of the step returned trajectories, including those dropped or replaced since."""
    failed = sum(n for name, n in batch.counts.items() if name.startswith("failed/"))
    return batch.counts["episodes"] - batch.counts["rejected"] - failed


def write_groups(
    writer: TrajectoryWriter,
    batch: RolloutBatch,
    advantages: Tensor | None,
    n_groups: int,
    step: int,
    tokenizer: Any,
) -> int:
    """Write every sample of the first `n_groups` groups, special tokens shown; returns how many could not be.

    `advantages` [B, S], as the mean over an answer's tokens; None of groups that are not trained on, which are marked
    `dropped`.
    """
    trajectories, lost = batch.trajectories, 0
    for group, prompt in enumerate(batch.prompts[:n_groups]):
        for row in (trajectories["group_ids"] == group).nonzero().flatten().tolist():
            ids, trained = trajectories["input_ids"][row], trajectories["loss_mask"][row] != 0
            asked = (trajectories["attention_mask"][row] != 0) & (trained.cumsum(0) == 0)
            text, answer = tokenizer.batch_decode([ids[asked].tolist(), ids[trained].tolist()])
            extra: dict[str, Any] = {"answer": prompt.row["answer"]} if "answer" in prompt.row else {}
            if "truncated" in trajectories:
                extra["stop_reason"] = "length" if trajectories["truncated"][row] else "stop"
            if advantages is None:
                extra["dropped"] = True
            else:
                extra["advantage"] = advantages[row].sum().item() / max(int(trained.sum()), 1)
            lost += not writer.write(
                step,
                prompt.index,
                text,
                answer,
                trajectories["rewards"][row].item(),
                length=int(trained.sum()),
                split="train",
                **token_columns({name: column[row] for name, column in trajectories.items()}, tokenizer),
                **extra,
            )
    return lost


def token_columns(trajectory: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Returns what is written of each token of one trajectory [S], from the first trained one to its end.

    Columns are `tokens` and `logprobs`, null where the model was given a token; `turn_ids` where there are such tokens
    or several turns; `versions` where the answer spans several, else the one `version`.
    """
    trained = trajectory["loss_mask"] != 0
    shown = (trajectory["attention_mask"] != 0) & (trained.cumsum(0) > 0)
    given = ~trained[shown]
    logprobs = zip(trajectory["logprobs"][shown].tolist(), given.tolist(), strict=True)
    columns: dict[str, Any] = {
        "tokens": tokenizer.convert_ids_to_tokens(trajectory["input_ids"][shown].tolist()),
        "logprobs": [None if is_given else logprob for logprob, is_given in logprobs],
    }
    turns = trajectory.get("turn_ids")
    if turns is not None and (given.any() or turns[trained].unique().numel() > 1):
        columns["turn_ids"] = turns[shown].tolist()
    versions = trajectory["versions"][trained].unique().tolist()
    if len(versions) == 1:
        columns["version"] = versions[0]
    else:
        columns["versions"] = trajectory["versions"][shown].tolist()
    return columns


def newest_record(metrics: Path, step: int) -> dict[str, Any]:
    """Returns the last record of `metrics.jsonl` if it is of `step`, without step and time; else {}."""
    record = next(reversed(read_jsonl(metrics)), {"step": None}) if metrics.exists() else {"step": None}
    return {k: v for k, v in record.items() if k not in ("step", "time")} if record["step"] == step else {}


def reward_gains(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each kind of held-out reward: before the first step, and after the last."""
    rewards = [record for record in records if "eval/reward" in record]
    kinds = (("eval/reward", "sampled"), ("eval/greedy_reward", "greedy"))
    return [
        f"held-out reward, {what}: {rewards[0][name]:.3f} before, {rewards[-1][name]:.3f} after"
        for name, what in kinds
        if len(rewards) > 1 and name in rewards[0] and name in rewards[-1]
    ]
