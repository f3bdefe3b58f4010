"""Mistakes in what answers are worth."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ADVANTAGES = ("tests/rl/test_advantages.py", "tests/rl/test_prepare.py")

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the standard deviation of a group is over n, not n - 1",
        "rl/algorithms/advantages.py",
        "(groups.sum(centered.square()) / (groups.count - 1).clamp(min=1)).sqrt()",
        "(groups.sum(centered.square()) / groups.count).sqrt()",
        ADVANTAGES,
    ),
    Mutant(
        "a trajectory of several rows earns their sum",
        "rl/algorithms/advantages.py",
        'for reduce in ("amin", "amax", "mean")',
        'for reduce in ("amin", "amax", "sum")',
        ADVANTAGES,
    ),
    Mutant(
        "the mean of a group is over its rows",
        "rl/algorithms/advantages.py",
        "self.count = self.sum(torch.ones_like(self.rewards))",
        "self.count = self.sum(torch.bincount(self.trajectory_index).to(self.rewards))",
        ADVANTAGES,
    ),
    Mutant(
        "RLOO divides by the size of the group, itself included",
        "rl/algorithms/advantages.py",
        "(groups.mean * groups.count - groups.rewards) / (groups.count - 1).clamp(min=1)",
        "(groups.mean * groups.count - groups.rewards) / groups.count",
        ADVANTAGES,
    ),
    Mutant(
        "advantages are normalized over padding and prompts too",
        "rl/algorithms/advantages.py",
        "values = advantages[trained].double()",
        "values = advantages.double()",
        ADVANTAGES,
    ),
    Mutant(
        "GAE takes the value of a token between two turns for the next state's",
        "rl/algorithms/advantages.py",
        "next_value = torch.where(trained, values[:, t], next_value)",
        "next_value = values[:, t]",
        ADVANTAGES,
    ),
    Mutant(
        "GAE begins anew behind each turn",
        "rl/algorithms/advantages.py",
        "running = torch.where(trained, delta + gamma * lam * running, running)",
        "running = torch.where(trained, delta + gamma * lam * running, 0.0)",
        ADVANTAGES,
    ),
    Mutant(
        "rewards to go of REINFORCE++ leave out the token's own",
        "rl/algorithms/advantages.py",
        "inputs.token_totals.flip(1).cumsum(1).flip(1) * inputs.loss_mask",
        "(inputs.token_totals.flip(1).cumsum(1).flip(1) - inputs.token_totals) * inputs.loss_mask",
        ADVANTAGES,
    ),
    Mutant(
        "what tokens have earned is left out of a row's total",
        "rl/algorithms/advantages.py",
        "return self.rewards + (self.token_rewards * self.loss_mask).sum(1).to(self.rewards.dtype)",
        "return self.rewards",
        ADVANTAGES,
    ),
    Mutant(
        "step-wise GRPO compares the first rows of runs",
        "rl/algorithms/step_advantages.py",
        'scatter_reduce(0, index, rows, "amax")',
        'scatter_reduce(0, index, rows, "amin", include_self=False)',
        ("tests/rl/test_step_advantages.py",),
    ),
    Mutant(
        "GiGPO discounts from one row into another",
        "rl/algorithms/step_advantages.py",
        "if i + 1 < len(steps) and steps[i + 1].row == steps[i].row:",
        "if i + 1 < len(steps):",
        ("tests/rl/test_step_advantages.py",),
    ),
    Mutant(
        "states of different prompts are one",
        "rl/algorithms/steps.py",
        "states.setdefault((group, observed), len(states))",
        "states.setdefault((0, observed), len(states))",
        ("tests/rl/test_step_advantages.py",),
    ),
    Mutant(
        "AsymRE raises its baseline",
        "rl/algorithms/baselines.py",
        "groups.subtract_baseline(groups.mean) - settings.shift",
        "groups.subtract_baseline(groups.mean) + settings.shift",
        ADVANTAGES,
    ),
    Mutant(
        "a student is drawn away from its teacher",
        "rl/algorithms/distillation.py",
        "inputs.teacher_logprobs.to(logprobs) - logprobs",
        "logprobs - inputs.teacher_logprobs.to(logprobs)",
        ADVANTAGES,
    ),
    Mutant(
        "rewards are clipped before they are scaled",
        "rl/algorithms/advantages.py",
        "scaled = (rewards + self.bias) * self.scale\n"
        "        return scaled if self.clip is None else scaled.clamp(-self.clip, self.clip)",
        "bias = rewards + self.bias\n"
        "        return self.scale * (bias if self.clip is None else bias.clamp(-self.clip, self.clip))",
        ADVANTAGES,
    ),
    Mutant(
        "pass@k takes answers to be drawn with replacement",
        "rl/scores.py",
        "math.comb(n - correct, k) / math.comb(n, k)",
        "((n - correct) / n) ** k",
        ("tests/rl/test_scores.py",),
    ),
    Mutant(
        "Lite PPO's deviation is over rows",
        "rl/algorithms/baselines.py",
        "std = groups.rewards.std() if",
        "std = groups.row_rewards.std() if",
        (
            "tests/rl/test_advantages.py::test_lite_ppo_divides_by_the_deviation_of_trajectories_of_all_groups",
            "tests/rl/test_advantages.py::test_group_statistics_are_per_trajectory_never_per_turn",
        ),
    ),
    Mutant(
        "Lite PPO's deviation is over n, not n - 1",
        "rl/algorithms/baselines.py",
        "std = groups.rewards.std() if",
        "std = groups.rewards.std(correction=0) if",
        ("tests/rl/test_advantages.py::test_lite_ppo_divides_by_the_deviation_of_trajectories_of_all_groups",),
    ),
    Mutant(
        "Lite PPO's deviation is about the means of groups",
        "rl/algorithms/baselines.py",
        "std = groups.rewards.std() if",
        "std = (groups.rewards - groups.mean).std() if",
        ("tests/rl/test_advantages.py::test_lite_ppo_divides_by_the_deviation_of_trajectories_of_all_groups",),
    ),
    Mutant(
        "AsymRE's baseline is the mean over rows",
        "rl/algorithms/baselines.py",
        "groups.subtract_baseline(groups.mean) - settings.shift",
        "groups.subtract_baseline(groups.row_rewards.mean().expand_as(groups.mean)) - settings.shift",
        ("tests/rl/test_advantages.py::test_group_statistics_are_per_trajectory_never_per_turn",),
    ),
)
