"""Evaluation on held-out prompts, sampled and greedy, with fixed random streams."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from archon.generation.types import GenerationHyperparameters
from archon.rl.config import RLConfig
from archon.rl.episode import Episode
from archon.rl.prompts import Prompt
from archon.rl.rollout import Rollout, recorded_means
from archon.rl.workflows import RolloutWorkflow


def evaluation_workflows(
    config: RLConfig, trained: RolloutWorkflow, eval_workflow: RolloutWorkflow | None
) -> dict[str, RolloutWorkflow]:
    """Return the evaluation workflows by metric prefix."""
    if eval_workflow is not None:
        return {"": eval_workflow}
    workflows = {"": trained.with_gconfig(sampled_gconfig(config))}
    if config.evaluation.greedy:
        workflows["greedy_"] = trained.with_gconfig(config.gconfig.new(n_samples=1, greedy=True, temperature=1.0))
    return workflows


def sampled_gconfig(config: RLConfig) -> GenerationHyperparameters:
    """Return the sampling parameters of an evaluation."""
    return config.gconfig.new(n_samples=config.evaluation.n_samples, temperature=config.evaluation.temperature)


async def evaluate(
    rollout: Rollout, prompts: Sequence[Prompt], *, tokenizer: Any = None, well_formed: str | None = None
) -> dict[str, float]:
    """Run every prompt once through the rollout's workflow.

    Args:
        rollout: runs the workflow; its seed and the prompt indices seed all random streams.
        prompts: held-out rows.
        tokenizer: decodes answers for `well_formed`.
        well_formed: regular expression that a well-formed answer matches completely.

    Returns:
        `reward` (mean over prompts of the mean over trajectories), `length` (answer tokens), `failed` (prompts
        without a sample), `dropped` (dropped samples), if available `truncated` and `well_formed` (fractions of
        samples), and means of recorded values.
    """
    episodes = await rollout.run(prompts, is_eval=True)
    rollout.raise_if_empty(episodes)
    groups = [e.trajectories for e in episodes if e.trajectories]
    lengths = torch.cat([group["loss_mask"].sum(1) for group in groups]).double()
    metrics = recorded_means(episodes) | {
        "reward": torch.stack([e.rewards.mean() for e in episodes if e.trajectories]).mean().item(),
        "length": lengths.mean().item(),
        "failed": float(sum(not e.trajectories for e in episodes)),
        "dropped": float(sum(e.context.drops.total() for e in episodes)),
    }
    if all("truncated" in group for group in groups):
        metrics["truncated"] = torch.cat([group["truncated"] for group in groups]).double().mean().item()
    if well_formed is not None:
        matches = [re.fullmatch(well_formed, text) is not None for text in answer_texts(episodes, tokenizer)]
        metrics["well_formed"] = sum(matches) / len(matches)
    return metrics


def answer_texts(episodes: Sequence[Episode], tokenizer: Any) -> list[str]:
    """Decode the trained tokens of every sample, without special tokens."""
    tokens = []
    for episode in episodes:
        if episode.trajectories:
            ids, mask = episode.trajectories["input_ids"], episode.trajectories["loss_mask"].bool()
            tokens += [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)]
    return tokenizer.batch_decode(tokens, skip_special_tokens=True)
