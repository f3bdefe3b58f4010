"""Mistakes in rollouts and evaluation."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

EVALUATION = "tests/rl/test_evaluation.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "every turn of a conversation draws the same random numbers",
        "rl/workflows/conversation.py",
        "derive_seed(seed, index, record.turns)",
        "derive_seed(seed, index, 0)",
        ("tests/rl/test_multi_turn.py",),
    ),
    Mutant(
        "trajectories of different groups have the same id",
        "rl/rollout.py",
        '"trajectory_ids": number * size + ids}',
        '"trajectory_ids": number + ids}',
        ("tests/rl/test_rollout.py",),
    ),
    Mutant(
        "evaluation draws what training draws",
        "rl/rollout.py",
        "EVAL_STREAM if is_eval else TRAIN_STREAM",
        "TRAIN_STREAM",
        ("tests/rl/test_rollout.py", "tests/rl/test_evaluation.py"),
    ),
    Mutant(
        "every step draws the same answers to a prompt",
        "rl/rollout.py",
        "EVAL_STREAM if is_eval else TRAIN_STREAM, step, prompt.index)",
        "EVAL_STREAM if is_eval else TRAIN_STREAM, 0, prompt.index)",
        ("tests/rl/test_rollout.py",),
    ),
    Mutant(
        "the runs of a group draw the same answer",
        "rl/workflows/grouping.py",
        "context.seed = derive_seed(context.seed, run, 0) if run else context.seed",
        "context.seed = context.seed",
        ("tests/rl/test_areal_guide.py", "tests/rl/test_workflows.py"),
    ),
    Mutant(
        "the answers of a group draw from one random stream",
        "rl/episode_context.py",
        "seed = derive_seed(self._context.seed, self._requests)",
        "seed = derive_seed(self._context.seed, 0)",
        ("tests/rl/test_workflows.py", "tests/rl/test_rollout.py"),
    ),
    Mutant(
        "episodes may be a version staler than the bound",
        "rl/asynchronous.py",
        "(staleness + version + 1) * batch - (accepted + running)",
        "(staleness + version + 2) * batch - (accepted + running)",
        ("tests/rl/test_asynchronous.py::test_capacity_is_the_published_formula",),
    ),
    Mutant(
        "groups that are about to be too old are not waited for",
        "rl/asynchronous.py",
        "overdue = any(item.version <= self._version - self._staleness for item in self._running)",
        "overdue = any(item.version < self._version - self._staleness for item in self._running)",
        ("tests/rl/test_asynchronous.py::test_no_group_is_staler_than_the_bound_and_each_prompt_is_trained_on_once",),
    ),
    Mutant(
        "after a push the groups that it was trained on are not counted, so that one batch more runs ahead",
        "rl/asynchronous.py",
        "self._accepted = self._version * self._batch + len(self._done)",
        "self._accepted = max(0, self._version - 1) * self._batch + len(self._done)",
        ("tests/rl/test_asynchronous.py::test_no_group_is_staler_than_the_bound_and_each_prompt_is_trained_on_once",),
    ),
    Mutant(
        "every data-parallel rank trains on all of a batch",
        "rl/update.py",
        "_shard(packed, [trained[row] for row in rows], self.engine.ranks.dp)",
        "_shard(packed, [trained[row] for row in rows], self.engine.ranks.tp)",
        ("tests/distributed/test_ahead.py::test_every_prompt_is_trained_once_and_no_token_is_too_old[d2-2]",),
    ),
    Mutant(
        "after a resume prompts that were taken before are trained on again and again",
        "rl/prompts.py",
        "repeated, self._untrained = self._untrained[:n], self._untrained[n:]",
        "repeated = self._untrained[:n]",
        ("tests/rl/test_asynchronous.py::test_a_resumed_run_that_runs_ahead_trains_each_prompt_exactly_once",),
    ),
    Mutant(
        "failed episodes that no batch has counted are lost with the run",
        "rl/asynchronous.py",
        "[*waiting, *(episode.prompt for episode in self._replaced)]",
        "waiting",
        ("tests/rl/test_asynchronous.py::test_a_prompt_is_untrained_until_a_batch_has_it_or_counts_its_failure",),
    ),
    Mutant(
        "a ratio that is not a number passes the gate",
        "rl/logprob_check.py",
        "if not difference <= limit:",
        "if difference > limit:",
        ("tests/rl/test_trainer.py::test_gate_limit_grows_below_temperature_one_and_a_nan_never_passes",),
    ),
    Mutant(
        "a held-out reward is the mean over samples, so that prompts with lost ones count less",
        "rl/evaluation.py",
        "torch.stack([e.rewards.mean() for e in episodes if e.trajectories]).mean().item()",
        "torch.cat([e.rewards for e in episodes if e.trajectories]).mean().item()",
        ("tests/rl/test_evaluation.py",),
    ),
    Mutant(
        "the staleness of tokens is that of prompts and padding too",
        "rl/summary.py",
        "behind = version - versions[(loss_mask != 0) & (versions >= 0)]",
        "behind = version - versions",
        ("tests/rl/test_summary.py",),
    ),
    Mutant(
        "greedy evaluation samples",
        "rl/evaluation.py",
        "config.gconfig.new(n_samples=1, greedy=True, temperature=1.0)",
        "config.gconfig.new(n_samples=1, greedy=False, temperature=1.0)",
        (f"{EVALUATION}::test_greedy_evaluation_answers_with_the_most_likely_tokens",),
    ),
    Mutant(
        "greedy evaluation uses the sampled evaluation's settings",
        "rl/evaluation.py",
        'workflows["greedy_"] = trained.with_gconfig(config.gconfig.new(n_samples=1, greedy=True, temperature=1.0))',
        'workflows["greedy_"] = workflows[""]',
        (f"{EVALUATION}::test_greedy_evaluation_answers_with_the_most_likely_tokens",),
    ),
    Mutant(
        "evaluation samples at the training temperature",
        "rl/evaluation.py",
        "n_samples=config.evaluation.n_samples, temperature=config.evaluation.temperature",
        "n_samples=config.evaluation.n_samples",
        (f"{EVALUATION}::test_evaluation_samples_at_its_own_temperature",),
    ),
    Mutant(
        "an evaluation has as many samples as training",
        "rl/evaluation.py",
        "n_samples=config.evaluation.n_samples, temperature=config.evaluation.temperature",
        "temperature=config.evaluation.temperature",
        (f"{EVALUATION}::test_evaluation_samples_at_its_own_temperature",),
    ),
    Mutant(
        "the workflow of evaluation keywords samples as training does",
        "rl/trainer.py",
        '                offered["gconfig"] = sampled_gconfig(config)\n',
        "",
        (f"{EVALUATION}::test_evaluation_samples_at_its_own_temperature",),
    ),
    Mutant(
        "a workflow's copy for evaluation keeps the training settings",
        "rl/workflows/base.py",
        "        changed.gconfig = gconfig\n",
        "        changed.gconfig = self.gconfig.new(n_samples=gconfig.n_samples)\n",
        (
            f"{EVALUATION}::test_greedy_evaluation_answers_with_the_most_likely_tokens",
            f"{EVALUATION}::test_evaluation_samples_at_its_own_temperature",
        ),
    ),
)
