"""A run with an algorithm, a filter and a loss weight for each environment."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.generation import InProcessEngine
from archon.rl import RLTrainer, RLVRWorkflow
from archon.rl.algorithms.config import AlgorithmConfig, GroupRule
from archon.rl.algorithms.objective import PolicyObjective
from archon.rl.config import RLConfig
from archon.rl.environment_update import EnvironmentsObjective, EnvironmentUpdate
from archon.rl.rollout import Rollout
from archon.rl.update import PolicyUpdate
from archon.schema.errors import ConfigError, DatasetError
from archon.training.batch_sharding import take_rows
from archon.training.metrics import read_jsonl
from tests.rl import rewards_for_tests as rewards
from tests.rl.conftest import small_run
from tests.rl.formulas import documents, plain_objective
from tests.rl.objectives import (
    assert_same,
    environments,
    float64_engine,
    of_environments,
    padded,
    steps_undone,
    trajectories,
)
from tests.rl.test_objective import random_batch
from tests.rl.test_rollout import GCONFIG, FlatOnOdd, Stream
from tests.tolerances import FORMULA_FP64, INVARIANCE_FP64


def test_loss_and_gradients_are_the_weighted_sum_of_separate_updates(blank: Path) -> None:
    """The same engine takes a step on the rows of each environment alone, with that environment's algorithm."""
    engine, batch = float64_engine(str(blank)), trajectories()
    metrics, gradients = of_environments(engine, batch)
    loss, total = 0.0, dict[str, torch.Tensor]()
    for number, (name, environment) in enumerate(environments().items()):
        rows = take_rows(batch, (batch["group_ids"] == number).nonzero().flatten().tolist())
        update = PolicyUpdate(engine, engine, environment.algorithm, temperature=0.8, max_new_tokens=6)
        with steps_undone(policy=engine) as found:
            prepared, _ = update.prepare(rows, step=0)
            measured = update.train(prepared, step=0)
        loss += environment.weight * measured["loss"]
        for key, gradient in found.items():
            total[key] = total.get(key, torch.zeros_like(gradient)) + environment.weight * gradient
        policy_loss = metrics[f"environment/{name}/policy_loss"]
        assert policy_loss == pytest.approx(measured["policy_loss"], rel=INVARIANCE_FP64, abs=INVARIANCE_FP64)
    assert metrics["loss"] == pytest.approx(loss, rel=INVARIANCE_FP64)
    assert total.keys() == gradients.keys()
    for key, gradient in total.items():
        assert (gradients[key] - gradient).abs().max() / gradient.abs().max() < INVARIANCE_FP64, key


def test_loss_and_gradients_do_not_change_under_padding_order_and_micro_batch_split(blank: Path) -> None:
    batch, engine = trajectories(), float64_engine(str(blank))
    expected = of_environments(engine, batch)
    assert_same(of_environments(engine, padded(batch)), expected)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    assert_same(of_environments(engine, {name: value[order] for name, value in batch.items()}), expected)
    split = of_environments(float64_engine(str(blank), max_tokens_per_mb=14), batch)
    assert split[0]["micro_batches"] > 3
    assert_same(split, expected)


def test_objective_equals_plain_loops() -> None:
    """Each environment has the mean of its own aggregation, over its own documents."""
    logprobs, entropy, batch = random_batch()
    ids = torch.tensor([0, 1, 1, 0, 1])
    configs = [
        AlgorithmConfig.parse({"preset": "grpo", "entropy_coef": 0.1}),
        AlgorithmConfig.parse({"preset": "dppo", "kl": {"coef": 0.2}, "policy_loss": {"delta_low": 0.1}}),
    ]
    weights, mask = [0.3, 1.7], batch["loss_mask"]
    owners = ids.repeat_interleave(torch.tensor(batch.lengths))
    expected, scales = 0.0, dict[int, float]()
    for number, config in enumerate(configs):
        own = documents(batch.lengths, **batch.fields | {"loss_mask": mask * (owners == number)})
        expected += weights[number] * plain_objective(logprobs, entropy, own, config)
        scales[number] = weights[number] * int(mask.sum()) / PolicyObjective(config).units(own).item()
    together = documents(batch.lengths, **batch.fields, environment_ids=ids)
    objective = EnvironmentsObjective([PolicyObjective(config) for config in configs], ["a", "b"], scales)
    loss, _ = objective(logprobs, entropy, together)
    assert (loss / objective.units(together)).item() == pytest.approx(expected, rel=FORMULA_FP64)


def test_environment_without_rows_in_a_batch_adds_nothing(blank: Path) -> None:
    engine, batch = float64_engine(str(blank)), trajectories()
    two = take_rows(batch, (batch["group_ids"] < 2).nonzero().flatten().tolist())
    metrics, gradients = of_environments(engine, two)
    assert "environment/games/policy_loss" not in metrics and metrics["environment/math/samples"] == 3
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())


def test_units_of_an_environment_are_those_of_its_rows_in_the_minibatch(blank: Path) -> None:
    # Rows 0, 1, 3, 6 have 1, 6, 2 and 3 trained tokens. Of math (rows 0, 3, 6) they are 3 answers; of code (row 1), 6
    # tokens. N = 12, so the scales are 2 · 12 / 3 and 0.5 · 12 / 6.
    options: dict[str, Any] = {"temperature": 0.8, "environments": environments()}
    update = EnvironmentUpdate(float64_engine(str(blank)), None, AlgorithmConfig(), **options)
    batch = trajectories() | {"environment_ids": torch.arange(9) % 3}
    rows = [0, 1, 3, 6]
    assert batch["loss_mask"][rows].sum(1).tolist() == [1, 6, 2, 3]
    assert update._objective_of(batch, rows).scales == pytest.approx({0: 8.0, 1: 1.0})


def test_each_environment_has_its_own_filter(engine: InProcessEngine, tokenizer: Any) -> None:
    rlvr = RLVRWorkflow(rewards.count_digits, GCONFIG, tokenizer)
    # Odd prompts have equal rewards. Of 0 to 5, 1 and 5 are kept, 3 is replaced by 6.
    rules = [GroupRule("keep"), GroupRule("resample")]
    rollout = Rollout(engine, FlatOnOdd(rlvr), rule=lambda prompt: rules[prompt.index % 4 == 3], log=lambda _: None)
    stream = Stream()
    batch = asyncio.run(rollout.collect(stream.take, 6, step=0, max_resamples=2))
    assert [prompt.index for prompt in batch.prompts] == [0, 1, 2, 4, 5, 6] and stream.asked == [6, 1]


def two_environments(blank: Path, tmp_path: Path) -> dict[str, Any]:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "environment": ["sums", "words"][i % 2]} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = small_run(blank, tmp_path / "run") | {"reward": "tests.rl.rewards_for_tests.count_digits", "total_steps": 2}
    run["train_data"] = {"path": str(tmp_path / "rows.jsonl"), "response_key": "answer"}
    run["environments"] = {"sums": {}, "words": {"algorithm": {"preset": "dppo"}, "weight": 0.5}}
    run.pop("eval_data", None)
    return run | {"algorithm": {"preset": "grpo", "kl": {"coef": 0.1}}}


def test_a_run_trains_each_environment_with_its_algorithm(blank: Path, tmp_path: Path) -> None:
    run = two_environments(blank, tmp_path)
    config = RLConfig.parse(run)
    assert [each.policy_loss.kind for each in config.algorithms] == ["ppo", "dppo"]
    assert config.resolve().ref is not None
    RLTrainer(config).train()
    records = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert len(records) == 2
    for row in records:
        assert row["environment/sums/samples"] + row["environment/words/samples"] == row["samples"]
        assert row["grad_norm"] > 0 and "environment/words/policy_loss" in row
    wrong = run | {"environments": {"sums": {}}, "run_dir": str(tmp_path / "other")}
    with pytest.raises(DatasetError, match="has environment='words', expected a name in `environments`: sums"):
        RLTrainer(RLConfig.parse(wrong)).train()
    extra = run | {"environments": run["environments"] | {"code": {}}, "run_dir": str(tmp_path / "other")}
    with pytest.raises(DatasetError, match=r"environments\.code: no row of train_data has this environment"):
        RLTrainer(RLConfig.parse(extra)).train()


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"preset": "ppo", "minibatches": 1}, r"words\.algorithm\.advantage is gae, whose critic or teacher all rows"),
        ({"preset": "distill"}, r"words\.algorithm\.advantage is distill, whose critic or teacher all rows share"),
        ({"preset": "chord"}, r"words\.algorithm\.policy_loss is chord, whose demonstrations belong to no environment"),
        (
            {"preset": "gspo"},
            r"words\.algorithm\.minibatches is 4, but algorithm\.minibatches is 1; .* set both to one",
        ),
    ],
)
def test_algorithms_that_environments_cannot_have_apart_are_refused(
    blank: Path, tmp_path: Path, algorithm: dict[str, Any], message: str
) -> None:
    run = two_environments(blank, tmp_path)
    run["environments"]["words"] = {"algorithm": algorithm}
    with pytest.raises(ConfigError, match=message):
        RLConfig.parse(run)
    with pytest.raises(ConfigError, match="environments is empty; name at least one, or leave it out"):
        RLConfig.parse(run | {"environments": {}})
