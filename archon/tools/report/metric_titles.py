"""Plain titles of metrics, with the meaning that a page shows when the pointer rests on one."""

from __future__ import annotations

TITLES: dict[str, tuple[str, str]] = {
    "reward": ("reward", "mean reward of all answers, also of groups that are dropped or replaced"),
    "trained_reward": ("trained reward", "mean reward of the trained batch"),
    "greedy_reward": ("greedy reward", "mean reward of the most likely answers"),
    "greedy_length": ("greedy length", "mean tokens of the most likely answers"),
    "length": ("length", "mean tokens of an answer"),
    "loss": ("loss", "of the update"),
    "accuracy": (
        "accuracy",
        "share of pairs in which the chosen answer has the higher value; kto: share of answers on their label's side",
    ),
    "margin": ("margin", "value of the chosen answer minus value of the rejected answer, mean over pairs"),
    "approx_kl": ("KL to the rollout policy", "between the updated policy and the one that sampled, nats per token"),
    "kl_ref": ("KL to the reference", "between the policy and the reference model, nats per token"),
    "teacher_kl": ("KL to the teacher", "between the policy and the teacher, nats per token"),
    "entropy": ("entropy", "of the policy's next token, nats per token"),
    "advantage_mean": ("mean advantage", "over trained tokens"),
    "advantage_std": ("spread of advantages", "standard deviation over trained tokens"),
    "advantage_max": ("largest advantage", "largest absolute advantage of a trained token"),
    "samples_per_second": ("answers", "answers per second over all phases except evaluation"),
    "tokens_per_second": ("tokens", "trained tokens per second"),
    "seconds/rollout": ("rollout", "wall time of sampling the step's answers"),
    "seconds/score": ("scoring", "wall time of scoring the batch before the update"),
    "seconds/update": ("update", "wall time of the optimizer steps"),
    "seconds/push": ("push", "wall time of sending the weights to the generator"),
    "seconds/evaluate": ("evaluation", "wall time of held-out prompts"),
    "seconds/step": ("step", "wall time of a step"),
    "clip_fraction": ("clipped", "share of tokens with a clipped policy ratio"),
    "clip_fraction_low": ("clipped below", "share of tokens with a policy ratio clipped below 1"),
    "clip_fraction_high": ("clipped above", "share of tokens with a policy ratio clipped above 1"),
    "staleness_mean": ("mean staleness", "trained version minus the version that sampled a token, mean over tokens"),
    "staleness_max": ("largest staleness", "trained version minus the version that sampled a token, the largest"),
    "truncated": ("truncated", "share of answers that reached a length limit"),
    "zero_variance_fraction": ("groups of equal reward", "share of the generated groups, which have no gradient"),
    "overlong_fraction": ("overlong", "share of answers with a length penalty"),
    "grad_norm": ("gradient norm", "of all trained weights, before clipping"),
    "lr": ("learning rate", "of the step"),
}
"""(title, meaning) by the name of a metric, without its prefix `eval/`."""


def metric_title(name: str) -> tuple[str, str]:
    """Return title and meaning of a metric; its name and no meaning if it has no plain title."""
    base = name.removeprefix("eval/")
    if base not in TITLES:
        return name, ""
    title, meaning = TITLES[base]
    return (title, meaning) if base == name else (f"held-out {title}", f"{meaning}; on held-out data")
