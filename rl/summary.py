"""Records of an RL step: metrics of a batch, and some of its trajectories."""

from __future__ import annotations

from collections import Counter
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
"""Numbers of consecutive steps without learning at which the run warns."""

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
            "trained_reward": rewards.mean().item(),
            "reward_std": rewards.std(correction=0).item(),
            "length": batch.trajectories["loss_mask"].sum(1).double().mean().item(),
            "samples": float(len(rewards)),
            "groups": float(len(batch.prompts)),
            **staleness(batch.trajectories["versions"], batch.trajectories["loss_mask"], version),
        }
        if "truncated" in batch.trajectories:
            metrics["truncated"] = batch.trajectories["truncated"].double().mean().item()
    if (
        batch.reward is not None
    ):  # over all answers: without the dropped groups of equal rewards, it would hide progress
        metrics["reward"] = batch.reward
    if generated := batch if batch else batch.dropped:
        metrics["nonzero_rewards"] = (generated.trajectories["rewards"] != 0).double().mean().item()
        metrics["group_size"] = len(trajectory_ids(generated.trajectories).unique()) / len(generated.prompts)
    failed = sum(n for name, n in batch.counts.items() if name.startswith("failed/"))
    # Episodes that returned trajectories, including dropped and replaced ones.
    if (n_groups := batch.counts["episodes"] - batch.counts["rejected"] - failed) > 0:
        metrics["zero_variance_fraction"] = batch.counts["zero_variance_groups"] / n_groups
    return metrics | batch.numbers | NO_FAILURES | {f"rollout/{name}": float(n) for name, n in batch.counts.items()}


class StallMonitor:
    """Warnings that a run learns nothing, with the likely causes.

    Args:
        compares_groups: the advantage compares the answers of a group.
    """

    def __init__(self, compares_groups: bool) -> None:
        self._compares_groups = compares_groups
        self._steps = Counter[str]()  # consecutive, by symptom

    def observe(self, metrics: Mapping[str, float]) -> str | None:
        """Return a warning to log after a step with these metrics, or None. The first symptom explains the others."""
        equal = metrics.get("rollout/zero_variance_groups", 0.0)
        symptoms = {
            "single": self._compares_groups and metrics.get("group_size") == 1.0,
            "truncated": metrics.get("truncated") == metrics.get("skipped_update") == 1.0,
            "zero": metrics.get("nonzero_rewards") == 0.0,
            "equal": self._compares_groups and 0 < equal == metrics["rollout/episodes"],
            "gradient": metrics.get("grad_norm") == 0.0,
        }
        for symptom, present in symptoms.items():
            self._steps[symptom] = self._steps[symptom] + 1 if present else 0
        symptom = next((symptom for symptom, present in symptoms.items() if present), "")
        if symptom == "single" and self._steps[symptom] in (1, *WARN_AFTER_STEPS):
            return (
                "each group is one trajectory with advantage 0, so nothing is learned; return gconfig.n_samples "
                "trajectories per prompt, or one trajectory with returns_group = False on the workflow's class"
            )
        if symptom == "single" or self._steps[symptom] not in WARN_AFTER_STEPS:
            return None
        return {
            "truncated": "for {} steps every answer was cut off, so algorithm.overlong.mask_truncated left nothing to "
            "train; raise gconfig.max_new_tokens, or set it to false",
            "zero": "for {} steps every reward was 0; see trajectories.jsonl: are answers cut off "
            "(gconfig.max_new_tokens), does the reward find the answer in their format, and can the model solve some "
            "of these prompts?",
            "equal": "for {} steps all answers of a group had the same reward, so nothing is learned; check the reward "
            "function, gconfig.n_samples and gconfig.temperature",
            "gradient": "for {} steps every gradient was 0, so nothing is learned; is every trained parameter frozen, "
            "or every advantage 0?",
        }[symptom].format(self._steps[symptom])


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
