"""The synchronous trainer on a tiny model, through the real generator, the real engine and real reward processes."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archon.checkpoint.native import load_latest
from archon.generation.types import GenerationHyperparameters, InferenceEngine
from archon.rl import RLTrainer, RLVRWorkflow
from archon.rl.config import RLConfig
from archon.rl.episode_context import workflow_context
from archon.rl.logprob_check import MISMATCH_LIMITS, check_mismatch, mismatch_limit
from archon.rl.rollout import RolloutBatch, WorkflowError
from archon.rl.summary import StallMonitor
from archon.schema.errors import ConfigError, RewardError, RolloutError, UserError
from archon.training.metrics import read_jsonl
from archon.training.runner import Runner
from tests.rl.failed_update import require_no_checkpoint_of_a_failed_update
from tests.rl.written import prompts_trained, records
from tests.tolerances import FIRST_RATIO_FP32
from tests.warm import run_code

MakeConfig = Callable[..., RLConfig]


def weights(trainer: RLTrainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.engine.weights()}


def test_first_step_importance_ratio_is_one_through_the_real_generation_path(rl_config: MakeConfig) -> None:
    """Also after updates have been pushed: every step is first for its weights."""
    trainer = RLTrainer(rl_config(rollout={"prompts_per_step": 64, "n_gold_checks": 0}))
    with trainer.opened():
        for _ in range(3):
            batch = trainer.rollout_batch().trajectories
            logprobs = trainer.engine.forward_batch(batch, temperature=1.0)
            trained = batch["loss_mask"] == 1
            assert trained.sum() > 500
            ratio = (logprobs - batch["logprobs"])[trained].exp()
            assert (ratio - 1).abs().max() < FIRST_RATIO_FP32
            metrics = trainer.train_step()
            assert metrics["first_logprob_diff"] < FIRST_RATIO_FP32
            assert abs(metrics["ratio"] - 1) < FIRST_RATIO_FP32
            assert metrics["grad_norm"] > 0


def test_gate_refuses_to_train_when_generator_and_trainer_disagree(rl_config: MakeConfig) -> None:
    trainer = RLTrainer(rl_config())
    with trainer.opened():
        before = weights(trainer)
        wrong = {name: tensor * 1.01 for name, tensor in before.items()}
        trainer.generator.update_weights(wrong.items(), version=0)
        with pytest.raises(RolloutError, match=r"logprob check: .* differ from the generator's by .*limit 1.0e-04"):
            trainer.train_step()
        assert all(tensor.equal(before[name]) for name, tensor in weights(trainer).items())


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_weights_that_stop_reaching_the_generator_end_the_run(
    rl_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, max_staleness: int
) -> None:
    rollout = {"prompts_per_step": 6, "n_gold_checks": 0, "max_staleness": max_staleness}
    trainer = RLTrainer(rl_config(rollout=rollout))
    with trainer.opened():
        trainer.train_step()
        # Shared weights would reach it all the same: from here on it holds copies.
        trainer.generator.update_weights(weights(trainer).items(), version=trainer.engine.version)
        monkeypatch.setattr(trainer.generator, "update_weights", lambda *_, **__: None)
        trainer.train_step()
        with pytest.raises(RolloutError, match=r"logprob check: the trainer's logprobs differ"):
            trainer.train_step()


def test_gate_limit_grows_below_temperature_one_and_a_nan_never_passes() -> None:
    assert mismatch_limit("float32", 1.0) == mismatch_limit("float32", 2.0) == MISMATCH_LIMITS["float32"]
    assert mismatch_limit("float32", 0.5) == 2 * MISMATCH_LIMITS["float32"]
    with pytest.raises(RolloutError):
        check_mismatch(float("nan"), 1.0)


def test_gate_limit_is_that_of_the_lowest_temperature_of_a_batch(rl_config: MakeConfig) -> None:
    """Answer at a low temperature have larger rounding errors; 0 stands for the temperature of the run."""
    trainer = RLTrainer(rl_config())
    for column, lowest in (([0.0, 0.5, 1.5], 0.5), ([0.0, 0.0, 1.5], 1.0)):
        batch = RolloutBatch({"temperatures": torch.tensor([column])})
        assert trainer._mismatch_limit(batch) == mismatch_limit("float32", lowest)


def test_update_has_the_settings_of_the_run(rl_config: MakeConfig) -> None:
    """The logprobs are of the rollout's temperature, and half of 4 tokens are too long an answer."""
    algorithm = {"kl": {"coef": 0.0}, "overlong": {"penalty": 1.0, "buffer": 0.5}, "minibatches": 2}
    gconfig = {"n_samples": 4, "max_new_tokens": 4, "temperature": 0.7}
    orders = []
    for seed in (0, 1):
        trainer = RLTrainer(rl_config(algorithm=algorithm, gconfig=gconfig, seed=seed))
        with trainer.opened():
            batch = trainer.rollout_batch().trajectories
            assert trainer.update.logprob_difference(batch) < FIRST_RATIO_FP32
            _, metrics = trainer.update.prepare(batch, 0)
            too_long = (batch["loss_mask"].sum(1) > 2).double().mean().item()
            assert metrics["overlong_fraction"] == pytest.approx(too_long) and 0 < too_long < 1
            orders.append(list(trainer.update._minibatches(24, 0)))
    assert orders[0] != orders[1]


def test_learning_rate_reaches_the_end_of_its_schedule_with_the_run(rl_config: MakeConfig) -> None:
    """2 steps of 3 passes over 2 minibatches are 12 optimizer steps."""
    config = rl_config(total_steps=2, algorithm={"kl": {"coef": 0.0}, "ppo_epochs": 3, "minibatches": 2})
    config.actor.scheduler.kind, config.actor.scheduler.min_lr_ratio = "linear", 0.0
    RLTrainer(config).train()
    rows = read_jsonl(Path(config.run_dir) / "metrics.jsonl")
    # The gate compares logprobs before the first optimizer step, not after the last one.
    assert all(row["first_logprob_diff"] < FIRST_RATIO_FP32 < row["logprob_diff"] for row in rows)
    rates = [row["lr"] for row in rows]
    factors = [(12 - step) / 12 for step in range(12)]
    assert rates == pytest.approx([1e-3 * sum(part) / 6 for part in (factors[:6], factors[6:])])


def test_a_preset_with_a_kl_term_makes_its_reference_model(rl_config: MakeConfig) -> None:
    assert rl_config().resolve().ref is None
    config = rl_config(algorithm={"preset": "grpo"})
    ref = config.resolve().ref
    assert ref is not None and ref.path == config.actor.path
    with pytest.raises(ConfigError, match="ref is set, and the default algorithm has no KL term"):
        rl_config(algorithm={}, ref={})
    assert rl_config(algorithm={"kl": {"coef": 0.0}}, ref={}).resolve().ref is None


def test_reference_model_stays_where_training_began(rl_config: MakeConfig, blank: Path) -> None:
    trainer = RLTrainer(rl_config(algorithm={"preset": "grpo"}, ref={"path": str(blank), "init_from_scratch": True}))
    with trainer.opened():
        kl = [trainer.train_step()["kl_ref"] for _ in range(4)]
    assert kl[0] == pytest.approx(0, abs=1e-9)
    assert kl[3] > 1e-4
    assert kl[3] > kl[1] > 0


@pytest.mark.parametrize(
    "gconfig", [{"greedy": True}, {"top_p": 0.5}, {"top_k": 2}, {"min_new_tokens": 1}, {"seed": 1}, {"n_samples": 1}]
)
def test_sampling_values_that_cannot_be_trained_on_are_refused_by_the_configuration(
    rl_config: MakeConfig, gconfig: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=f"gconfig.{next(iter(gconfig))}"):
        rl_config(gconfig={"n_samples": 4, "max_new_tokens": 4} | gconfig)


@pytest.mark.parametrize("gconfig", [{"max_new_tokens": 4}, GenerationHyperparameters(max_new_tokens=4)])
def test_a_group_keeps_its_size_when_another_sampling_value_is_set(rl_config: MakeConfig, gconfig: Any) -> None:
    config = rl_config(gconfig=gconfig, algorithm={"preset": "reinforce_pp"})
    assert config.gconfig == GenerationHyperparameters(n_samples=8, max_new_tokens=4)
    assert rl_config(gconfig=config.gconfig.new(n_samples=2)).gconfig.n_samples == 2


def test_an_export_that_cannot_be_verified_is_refused_before_the_run(rl_config: MakeConfig) -> None:
    actor = rl_config().actor.model_dump() | {"dtype": "bfloat16"}
    with pytest.raises(ConfigError, match=r"verify_export compares float32 logits, but bfloat16 rounding"):
        rl_config(actor=actor, verify_export=True)


def test_a_verifier_scores_gold_answers_one_or_the_run_stops(rl_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+2=", "answer": "three"}) + "\n")
    config = rl_config(reward="gsm8k", train_data={"path": str(tmp_path / "rows.jsonl")})
    with pytest.raises(RewardError, match="fails on the gold answer of row 0"):
        RLTrainer(config).train()
    assert records(config) == []


def test_the_scores_of_gold_answers_with_another_reward_are_a_line(
    rl_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RLTrainer(rl_config(reward="tests.rl.rewards_for_tests.half", total_steps=1)).train()
    assert "gold answers score 0.5 to 0.5 with the reward tests.rl.rewards_for_tests.half" in capsys.readouterr().out
    again = {"run_dir": str(tmp_path / "again"), "reward": "tests.rl.rewards_for_tests.nothing"}
    RLTrainer(rl_config(total_steps=1, **again)).train()
    assert "warning: none scores above 0" in capsys.readouterr().out


def first_run(blank: Path, tmp_path: Path, **changes: Any) -> RLConfig:
    """Rows without answers, and nothing else that a run does not need."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+"}) + "\n" for i in range(8)))
    actor = {"path": str(blank), "init_from_scratch": True}
    data = {"path": str(tmp_path / "rows.jsonl")}
    run = {"run_dir": str(tmp_path / "first"), "total_steps": 1, "actor": actor, "train_data": data}
    return RLConfig.parse(run | {"gconfig": {"n_samples": 2, "max_new_tokens": 3}} | changes)


def test_a_model_rows_without_answers_and_a_reward_are_a_run(blank: Path, tmp_path: Path) -> None:
    metrics = RLTrainer(first_run(blank, tmp_path, reward="tests.rl.rewards_for_tests.count_digits")).train()
    assert metrics["samples"] == 64 and "kl_ref" not in metrics


def test_a_reward_that_needs_an_answer_names_it(blank: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reward .*exact_match.* needs 'answer', but the rows have 'messages'"):
        RLTrainer(first_run(blank, tmp_path, reward="exact_match")).train()


def test_an_agent_that_scores_itself_needs_no_reward(blank: Path, tmp_path: Path) -> None:
    config = first_run(blank, tmp_path, workflow="tests.rl.test_agent_training.Retries")
    assert RLTrainer(config).train()["samples"] > 0
    with pytest.raises(ConfigError, match="RLVRWorkflow scores answers with a reward, and none is set; set reward"):
        RLTrainer(first_run(blank, tmp_path, run_dir=str(tmp_path / "second"))).train()


def test_run_writes_metrics_trajectories_and_an_export(rl_config: MakeConfig) -> None:
    config = rl_config(
        eval_data={"path": "arithmetic", "split": "test"},
        evaluation={"every": 2, "max_prompts": 20, "well_formed": r"\d{1,3}"},
        verify_export=True,
    )
    newest = RLTrainer(config).train()
    rows = records(config)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [("eval/reward" in row, "eval/greedy_reward" in row) for row in rows] == [
        (True, True), (False, False), (True, True), (False, False), (True, True)
    ]  # fmt: skip
    assert 0 <= rows[0]["eval/well_formed"] <= 1
    assert rows[4]["eval/reward"] == newest["eval/reward"]
    assert [row["version"] for row in rows[1:]] == [1, 2, 3, 4]
    assert [row["rollout/prompts"] for row in rows[1:]] == [6] * 4
    assert prompts_trained(config) == [(step, 6 * (step - 1) + i) for step in (1, 2, 3, 4) for i in range(6)]
    dumped = read_jsonl(Path(config.run_dir) / "trajectories.jsonl")
    assert len(dumped) == 4 * 6 * 4
    assert all(len(row["tokens"]) == len(row["logprobs"]) == row["length"] for row in dumped)
    by_group = [row for row in dumped if row["group"] == 0]
    assert abs(sum(row["advantage"] for row in by_group)) < 1e-5
    assert (Path(config.run_dir) / "export" / "config.json").is_file()
    assert not undocumented({name for row in rows for name in row})


def undocumented(names: set[str]) -> set[str]:
    """The metrics that the guide does not name, those of greedy answers by their sampled ones."""
    guide = (Path(__file__).parents[2] / "docs" / "tasks" / "results.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([^`\n]+)`", guide.partition("## Metrics")[2]))
    known = re.compile("|".join([*map(re.escape, named), "rollout/dropped/.*", "rollout/failed/.*"]))
    return {name for name in names - {"step"} if not known.fullmatch(name.replace("eval/greedy_", "eval/"))}


def test_tokens_carry_the_version_of_the_weights_that_sampled_them(rl_config: MakeConfig) -> None:
    trainer = RLTrainer(rl_config())
    with trainer.opened():
        for version in (0, 1, 2):
            batch = trainer.rollout_batch().trajectories
            assert batch["versions"][batch["loss_mask"] == 1].unique().tolist() == [version]
            trainer.train_step()


class StopsAtStep(RLVRWorkflow):
    """Sends this process SIGTERM in the step that trains prompt 12, which is cut short."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        if workflow_context.get().task_id == 12 and not workflow_context.get().is_eval:
            os.kill(os.getpid(), signal.SIGTERM)
        return await super().arun_episode(engine, data)


def test_sigterm_saves_and_leaves_and_the_resumed_run_is_bitwise_the_uninterrupted_one(
    rl_config: MakeConfig, tmp_path: Path
) -> None:
    evaluation = {"eval_data": {"path": "arithmetic", "split": "test"}, "evaluation": {"every": 2, "max_prompts": 8}}
    whole_config = rl_config(run_dir=str(tmp_path / "whole"), total_steps=5, **evaluation)
    whole = RLTrainer(whole_config)
    whole.train()

    config = rl_config(run_dir=str(tmp_path / "parts"), total_steps=5, resume=True, **evaluation)
    with Runner(config.run_dir, config, resume=True) as runner:
        stopped = RLTrainer(config, runner)
        stopped.train(workflow=StopsAtStep)
        assert (stopped.step, runner.exit_code) == (2, 128 + signal.SIGTERM)
    assert not (tmp_path / "parts" / "export").exists()
    resumed = RLTrainer(config)
    resumed.train()

    assert resumed.step == 5
    expected = weights(whole)
    assert all(tensor.equal(expected[name]) for name, tensor in weights(resumed).items())
    assert records(config) == records(whole_config)
    assert prompts_trained(config) == prompts_trained(whole_config)
    assert len({group for _, group in prompts_trained(config)}) == 5 * 6


def test_evaluation_repeats_itself_and_does_not_touch_training(rl_config: MakeConfig, tmp_path: Path) -> None:
    evaluated = RLTrainer(
        rl_config(eval_data={"path": "arithmetic", "split": "test"}, evaluation={"max_prompts": 16, "every": 1})
    )
    plain = RLTrainer(rl_config(run_dir=str(tmp_path / "plain")))
    with evaluated.opened(), plain.opened():
        first = evaluated.evaluate()
        assert evaluated.evaluate() == first
        evaluated.train_step()
        plain.train_step()
        expected = weights(plain)
        assert all(tensor.equal(expected[name]) for name, tensor in weights(evaluated).items())


def test_a_workflow_to_evaluate_without_held_out_prompts_has_nothing_to_do(rl_config: MakeConfig) -> None:
    trainer = RLTrainer(rl_config(total_steps=1))
    with trainer.opened():
        workflow = trainer.rollout.workflow
    assert "reward" in RLTrainer(rl_config(total_steps=1)).train(eval_workflow=workflow)


def test_batch_without_spread_skips_the_update_and_says_so(rl_config: MakeConfig) -> None:
    algorithm = {"kl": {"coef": 0.0}, "zero_variance_groups": "resample"}
    rollout = {"prompts_per_step": 3, "max_resamples": 1}
    trainer = RLTrainer(rl_config(reward="tests.rl.rewards_for_tests.constant", algorithm=algorithm, rollout=rollout))
    with trainer.opened():
        before = weights(trainer)
        metrics = trainer.train_step()
        assert metrics["skipped_update"] == 1
        assert (metrics["rollout/zero_variance_groups"], metrics["rollout/resampled"]) == (6, 3)
        assert all(tensor.equal(before[name]) for name, tensor in weights(trainer).items())
        assert trainer.engine.version == 0


def test_a_run_says_when_its_rewards_teach_nothing(
    rl_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("archon.rl.summary.WARN_AFTER_STEPS", (2,))
    trainer = RLTrainer(rl_config(reward="tests.rl.rewards_for_tests.constant"))
    with trainer.opened():
        for told in (False, True, False):
            trainer.train_step()
            assert ("all answers of a group had the same reward" in capsys.readouterr().out) is told


@pytest.mark.parametrize("zero_variance_groups", ["keep", "drop"])
def test_a_run_warns_once_that_every_reward_is_0(
    rl_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    zero_variance_groups: str,
) -> None:
    monkeypatch.setattr("archon.rl.summary.WARN_AFTER_STEPS", (2,))
    algorithm = {"zero_variance_groups": zero_variance_groups}
    RLTrainer(rl_config(reward="tests.rl.rewards_for_tests.nothing", algorithm=algorithm)).train()
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(warnings) == 1
    assert warnings[0].startswith("step 2: for 2 steps every reward was 0; see trajectories.jsonl")


def test_the_first_symptom_of_a_stall_explains_the_others() -> None:
    equal = {"rollout/zero_variance_groups": 4.0, "rollout/episodes": 4.0}
    zero = {"nonzero_rewards": 0.0, "grad_norm": 0.0}
    for compares_groups, metrics, message in (
        (True, zero | equal, "every reward was 0"),
        (True, {"nonzero_rewards": 1.0, "grad_norm": 0.0} | equal, "all answers of a group had the same reward"),
        (False, {"nonzero_rewards": 1.0, "grad_norm": 0.0} | equal, "every gradient was 0"),
        (True, {"truncated": 1.0, "skipped_update": 1.0} | zero | equal, "every answer was cut off"),
    ):
        monitor = StallMonitor(compares_groups)
        warnings = [warning for _ in range(12) if (warning := monitor.observe(metrics))]
        assert len(warnings) == 1 and warnings[0].startswith("for 10 steps") and message in warnings[0]
    monitor = StallMonitor(True)
    steps = [{"nonzero_rewards": float(step == 9)} for step in range(19)]
    assert not any(monitor.observe(metrics) for metrics in steps), "nine in a row are not long"


def test_truncated_answers_are_not_trained(rl_config: MakeConfig) -> None:
    """Their rewards count in their group, and their tokens do not."""
    trainer = RLTrainer(rl_config(algorithm={"overlong": {"mask_truncated": True}}))
    with trainer.opened():
        batch = trainer.rollout_batch()
        trajectories, before = batch.trajectories, weights(trainer)
        truncated = trajectories["truncated"]
        assert 0 < truncated.sum() < len(truncated)
        prepared, _ = trainer.update.prepare(trajectories, 0)
        assert prepared["loss_mask"][truncated].sum() == 0
        assert prepared["loss_mask"][~truncated].equal(trajectories["loss_mask"][~truncated])
        # Without a trained token there is no update.
        trajectories["truncated"] = torch.ones_like(truncated)
        trainer.rollout_batch = lambda: batch  # type: ignore[method-assign]
        assert trainer.train_step()["skipped_update"] == 1
        assert trainer.engine.version == 0
        assert all(tensor.equal(before[name]) for name, tensor in weights(trainer).items())
        metrics = trainer.update.train(prepared, 0)
        assert metrics["loss_weight"] == float(prepared["loss_mask"].sum())
        del trajectories["truncated"]
        with pytest.raises(RolloutError, match="the workflow returns no `truncated`"):
            trainer.update.prepare(trajectories, 0)


def test_existing_run_is_not_overwritten_without_resume(rl_config: MakeConfig) -> None:
    RLTrainer(rl_config(total_steps=1)).train()
    with pytest.raises(ConfigError, match="already holds a run; set resume=true"):
        RLTrainer(rl_config(total_steps=1)).train()


def test_resume_with_other_data_is_refused(rl_config: MakeConfig) -> None:
    RLTrainer(rl_config(total_steps=1)).train()
    other = rl_config(total_steps=2, resume=True, train_data={"path": "arithmetic", "split": "test"})
    with pytest.raises(ValueError, match="cannot resume the data order"):
        RLTrainer(other).train()


@pytest.mark.parametrize("shuffled", [False, True])
def test_tiny_policy_learns_and_with_shuffled_rewards_it_does_not(rl_config: MakeConfig, shuffled: bool) -> None:
    """One token in 15 is a 7; the reward asks for it first. Same seed, same steps, only the rewards are permuted."""
    config = rl_config(
        reward="tests.rl.rewards_for_tests.starts_with_seven",
        gconfig={"n_samples": 8, "max_new_tokens": 2},
        rollout={"prompts_per_step": 16, "n_gold_checks": 0},
        control={"shuffle_rewards": shuffled},
        actor=rl_config().actor.model_dump() | {"optimizer": {"lr": 5e-3}},
    )
    trainer = RLTrainer(config)
    with trainer.opened():
        rewards = [trainer.train_step()["reward"] for _ in range(25)]
    start, end = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert start < 0.3
    if shuffled:
        assert abs(end - start) < 0.2
    else:
        assert end > 0.8


def test_progress_and_configuration_are_written_down(rl_config: MakeConfig, capsys: pytest.CaptureFixture[str]) -> None:
    config = rl_config(total_steps=2)
    RLTrainer(config).train()
    assert "rl 2/2  reward" in capsys.readouterr().out
    assert json.loads((Path(config.run_dir) / "versions.json").read_text())["torch"] == torch.__version__


class BreaksAtPrompt15(RLVRWorkflow):
    """Fails for good from the third step on."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        if workflow_context.get().task_id >= 12:
            raise OSError("the environment is gone")
        return await super().arun_episode(engine, data)


def test_error_that_ends_the_run_loses_nothing_trained_and_no_prompt(rl_config: MakeConfig, tmp_path: Path) -> None:
    whole_config = rl_config(run_dir=str(tmp_path / "whole"))
    whole = RLTrainer(whole_config)
    whole.train()
    config = rl_config(run_dir=str(tmp_path / "broken"), resume=True)
    with pytest.raises(WorkflowError, match="the environment is gone"):
        RLTrainer(config).train(workflow=BreaksAtPrompt15)
    resumed = RLTrainer(config)
    resumed.train()
    assert prompts_trained(config) == prompts_trained(whole_config)
    assert records(config) == records(whole_config)
    expected = weights(whole)
    assert all(tensor.equal(expected[name]) for name, tensor in weights(resumed).items())


def test_error_inside_an_update_saves_no_half_updated_weights(rl_config: MakeConfig) -> None:
    config = rl_config(checkpoint={"every": 0})
    trainer = RLTrainer(config)
    with Runner(config.run_dir, config) as runner:
        trainer.runner = runner
        train_step = trainer.train_step

        def fails_in_the_push() -> dict[str, float]:
            if trainer.step == 2:
                trainer.generator.update_weights = None  # type: ignore[method-assign, assignment]
            return train_step()

        trainer.train_step = fails_in_the_push  # type: ignore[method-assign]
        with pytest.raises(TypeError):
            trainer.train()
    assert load_latest(Path(config.run_dir) / "checkpoints") is None


def test_error_of_an_optimizer_saves_no_checkpoint(rl_config: MakeConfig) -> None:
    config = rl_config(checkpoint={"every": 0})
    trainer = RLTrainer(config)
    require_no_checkpoint_of_a_failed_update(trainer, trainer.train, Path(config.run_dir) / "checkpoints")


def test_what_is_there_before_a_run_is_frozen_during_it_unless_somebody_else_has_frozen_it() -> None:
    done = run_code(
        "import gc\n"
        "from archon.training.loop import freeze_gc as frozen\n"
        "gc.unfreeze()\n"
        "with frozen():\n"
        "    print(gc.get_freeze_count() > 1000)\n"
        "print(gc.get_freeze_count())\n"
        "gc.freeze()\n"
        "before = gc.get_freeze_count()\n"
        "with frozen():\n"
        "    pass\n"
        "print(gc.get_freeze_count() > 0.9 * before)\n"
    )
    assert done.stdout.split() == ["True", "0", "True"], done.stderr


@pytest.mark.parametrize(("before", "within"), [((700, 10, 10), (10_000, 10, 10)), ((0, 10, 10), (0, 10, 10))])
def test_new_objects_are_collected_seldom_unless_somebody_else_collects(before: Any, within: Any) -> None:
    done = run_code(
        "import gc\n"
        "from archon.training.loop import freeze_gc as frozen\n"
        "gc.unfreeze()\n"
        f"gc.set_threshold(*{before})\n"
        "with frozen():\n"
        "    print(gc.get_threshold())\n"
        "print(gc.get_threshold())\n"
    )
    assert done.stdout.splitlines() == [str(within), str(before)], done.stderr
