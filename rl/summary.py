"""What a step of RL writes down: numbers about a batch, and a few of its trajectories in full."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from archon.metrics import TrajectoryWriter
from archon.rl.rollout import RolloutBatch


def batch_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Reward and length of the samples in the batch, what workflows recorded, and every count as `rollout/<name>`."""
    metrics: dict[str, float] = {}
    if batch:
        rewards = batch.trajectories["rewards"].double()
        metrics = {
            "reward": rewards.mean().item(),
            "reward_std": rewards.std(correction=0).item(),
            "length": batch.trajectories["loss_mask"].sum(1).double().mean().item(),
            "samples": float(len(rewards)),
            "groups": float(len(batch.prompts)),
        }
        if "truncated" in batch.trajectories:
            metrics["truncated"] = batch.trajectories["truncated"].double().mean().item()
    return metrics | batch.numbers | {f"rollout/{name}": float(n) for name, n in batch.counts.items()}


def write_groups(
    writer: TrajectoryWriter, batch: RolloutBatch, advantages: Tensor, n_groups: int, step: int, tokenizer: Any
) -> None:
    """Write every sample of the first `n_groups` groups, special tokens shown; `advantages` [B, S] as the mean over an
    answer's tokens."""
    trajectories = batch.trajectories
    for group, prompt in enumerate(batch.prompts[:n_groups]):
        for row in (trajectories["group_ids"] == group).nonzero().flatten().tolist():
            ids, trained = trajectories["input_ids"][row], trajectories["loss_mask"][row] != 0
            asked = (trajectories["attention_mask"][row] != 0) & (trained.cumsum(0) == 0)
            text, answer = tokenizer.batch_decode([ids[asked].tolist(), ids[trained].tolist()])
            extra = {"answer": prompt.row["answer"]} if "answer" in prompt.row else {}
            if "truncated" in trajectories:
                extra["stop_reason"] = "length" if trajectories["truncated"][row] else "stop"
            writer.write(
                step,
                prompt.index,
                text,
                answer,
                trajectories["rewards"][row].item(),
                length=int(trained.sum()),
                advantage=advantages[row].sum().item() / max(int(trained.sum()), 1),
                split="train",
                tokens=tokenizer.convert_ids_to_tokens(ids[trained].tolist()),
                logprobs=trajectories["logprobs"][row][trained].tolist(),
                **extra,
            )
