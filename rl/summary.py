"""Records of an RL step: metrics of a batch, and some of its trajectories."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from archon.engine.batch import IMAGES
from archon.models.vision.images import ProcessedImage
from archon.rl.rewards.result import FAILURE_KINDS
from archon.rl.rollout import RolloutBatch
from archon.rl.trajectories import trajectory_ids
from archon.training.metrics import TrajectoryWriter, read_jsonl

WARN_AFTER_STEPS = (10, 100, 1000)
"""Numbers of consecutive steps with only zero-variance groups at which the run warns."""

# Part of every record: a step without failures is 0, not a gap.
NO_FAILURES = {f"rollout/dropped/reward_{kind}": 0.0 for kind in FAILURE_KINDS}


def batch_metrics(batch: RolloutBatch, version: int) -> dict[str, float]:
    """Return metrics of the samples, recorded values, and every count as `rollout/<name>`.

    `version` is the version of the trainer's weights, for `staleness_…`.
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
    failed = sum(n for name, n in batch.counts.items() if name.startswith("failed/"))
    # Episodes that returned trajectories, including dropped and replaced ones.
    if (n_groups := batch.counts["episodes"] - batch.counts["rejected"] - failed) > 0:
        metrics["zero_variance_fraction"] = batch.counts["zero_variance_groups"] / n_groups
    return metrics | batch.numbers | NO_FAILURES | {f"rollout/{name}": float(n) for name, n in batch.counts.items()}


class ZeroVarianceMonitor:
    """Warning if all groups have equal rewards for many steps."""

    def __init__(self) -> None:
        self._steps = 0  # consecutive

    def observe(self, metrics: Mapping[str, float]) -> str | None:
        """Return a warning to log after a step with these metrics of `batch_metrics`, or None."""
        zero_variance = metrics.get("rollout/zero_variance_groups", 0.0)
        is_single = metrics.get("group_size") == 1.0
        affected = is_single or (zero_variance and zero_variance == metrics["rollout/episodes"])
        self._steps = self._steps + 1 if affected else 0
        if is_single and self._steps in (1, *WARN_AFTER_STEPS):
            return (
                "each group is one trajectory with advantage 0, so nothing is learned; return gconfig.n_samples "
                "trajectories per prompt, or one trajectory with returns_group = False on the workflow's class"
            )
        if self._steps not in WARN_AFTER_STEPS:
            return None
        return (
            f"for {self._steps} steps all answers of a group had the same reward, so nothing is learned; "
            "check the reward function, gconfig.n_samples and gconfig.temperature"
        )


def staleness(versions: Tensor, loss_mask: Tensor, version: int) -> dict[str, float]:
    """Return mean and maximum of `version` minus the version of each trained token.

    Tokens of unknown version (−1) are ignored; the result is {} without other tokens.
    """
    behind = version - versions[(loss_mask != 0) & (versions >= 0)]
    if not behind.numel():
        return {}
    return {"staleness_mean": behind.double().mean().item(), "staleness_max": float(behind.max())}


def write_groups(
    writer: TrajectoryWriter,
    batch: RolloutBatch,
    advantages: Tensor | None,
    n_groups: int,
    step: int,
    tokenizer: Any,
    write_images: Callable[[Sequence[ProcessedImage]], list[str]] | None = None,
) -> int:
    """Write all samples of the first `n_groups` groups; return the number of failed writes.

    The text includes special tokens. `advantages` [B, S] is averaged over an answer's tokens; None marks the groups as
    `dropped`. `write_images` writes the images of an answer and returns their file names.
    """
    trajectories, lost = batch.trajectories, 0
    for group, prompt in enumerate(batch.prompts[:n_groups]):
        for row in (trajectories["group_ids"] == group).nonzero().flatten().tolist():
            ids, trained = trajectories["input_ids"][row], trajectories["loss_mask"][row] != 0
            is_prompt = (trajectories["attention_mask"][row] != 0) & (trained.cumsum(0) == 0)
            text, answer = tokenizer.batch_decode([ids[is_prompt].tolist(), ids[trained].tolist()])
            extra: dict[str, Any] = {"answer": prompt.row["answer"]} if "answer" in prompt.row else {}
            if write_images is not None and (images := trajectories[IMAGES][row] if IMAGES in trajectories else []):
                extra["images"] = write_images(images)
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
    """Return per-token columns of one trajectory [S], from its first trained token to its end.

    The columns are `tokens` and `logprobs` (null for input tokens), `turn_ids` if there are input tokens or several
    turns, and `versions`, or `version` if there is only one.
    """
    trained = trajectory["loss_mask"] != 0
    shown = (trajectory["attention_mask"] != 0) & (trained.cumsum(0) > 0)
    is_input = ~trained[shown]
    logprobs = zip(trajectory["logprobs"][shown].tolist(), is_input.tolist(), strict=True)
    columns: dict[str, Any] = {
        "tokens": tokenizer.convert_ids_to_tokens(trajectory["input_ids"][shown].tolist()),
        "logprobs": [None if masked else logprob for logprob, masked in logprobs],
    }
    turns = trajectory.get("turn_ids")
    if turns is not None and (is_input.any() or turns[trained].unique().numel() > 1):
        columns["turn_ids"] = turns[shown].tolist()
    versions = trajectory["versions"][trained].unique().tolist()
    if len(versions) == 1:
        columns["version"] = versions[0]
    else:
        columns["versions"] = trajectory["versions"][shown].tolist()
    return columns


def newest_record(metrics: Path, step: int) -> dict[str, Any]:
    """Return the last record of `metrics.jsonl` without step and time if it belongs to `step`, else {}."""
    records = read_jsonl(metrics) if metrics.exists() else []
    if not records or records[-1]["step"] != step:
        return {}
    return {name: value for name, value in records[-1].items() if name not in ("step", "time")}


def reward_gains(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line per kind of held-out reward with its first and last value."""
    rewards = [record for record in records if "eval/reward" in record]
    names = {"eval/reward": "sampled", "eval/greedy_reward": "greedy"}
    return [
        f"held-out reward, {kind}: {rewards[0][name]:.3f} before, {rewards[-1][name]:.3f} after"
        for name, kind in names.items()
        if len(rewards) > 1 and name in rewards[0] and name in rewards[-1]
    ]
