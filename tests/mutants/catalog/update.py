"""Mistakes in the update of a policy and its critic."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

UPDATE = ("tests/rl/test_prepare.py", "tests/rl/test_update.py", "tests/rl/test_critic.py")

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "the overlong penalty counts the prompt",
        "rl/update.py",
        'overlong_penalty(trajectories["loss_mask"].sum(1)',
        'overlong_penalty(trajectories["attention_mask"].sum(1)',
        UPDATE,
    ),
    Mutant(
        "the batch is scored at temperature 1",
        "rl/update.py",
        "return engine.forward_batch(documents, self.temperature, only_trained=True)",
        "return engine.forward_batch(documents, only_trained=True)",
        UPDATE,
    ),
    Mutant(
        "the policy is trained at temperature 1",
        "rl/update.py",
        "objective, objective.units, self.temperature)",
        "objective, objective.units)",
        UPDATE,
    ),
    Mutant(
        "the critic's learning rate never moves",
        "rl/update.py",
        "                self.critic.step_lr_scheduler()\n",
        "",
        UPDATE,
    ),
    Mutant(
        "minibatches are the same ones in every pass",
        "rl/update.py",
        "_generator(self.seed, step, 2 + epoch)",
        "_generator(self.seed, step, 2)",
        UPDATE,
    ),
    Mutant(
        "minibatches are the same rows in every step",
        "rl/update.py",
        "_generator(self.seed, step, 2 + epoch)",
        "_generator(self.seed, 0, 2 + epoch)",
        UPDATE,
    ),
    Mutant(
        "the control shuffles rewards alike in every step",
        "rl/update.py",
        "_generator(self.seed, step, 1)",
        "_generator(self.seed, 0, 1)",
        UPDATE,
    ),
    Mutant(
        "the ratio of the first optimizer step is reported of the last one",
        "rl/update.py",
        'results[0]["logprob_diff"]',
        'results[-1]["logprob_diff"]',
        (*UPDATE, "tests/rl/test_trainer.py"),
    ),
)
