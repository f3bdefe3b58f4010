"""`train` called as AReaL's guides call it: workflows by name and path, their arguments, a filter, given rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import datasets
import pytest

from archon.checkpoint.tokenizer import load_tokenizer
from archon.data import get_custom_dataset
from archon.generation.types import InferenceEngine
from archon.rl import RLTrainer, register_workflow
from archon.rl.compat.areal import GenerationHyperparameters, PPOTrainer, SFTTrainer
from archon.rl.config import RLConfig
from archon.rl.workflows import resolve
from archon.schema.errors import ConfigError, DatasetError
from archon.training import SFTConfig
from archon.training.metrics import read_jsonl
from tests.rl import areal_guide as guide
from tests.small_vision import write_vision_model
from tests.tolerances import FIRST_RATIO_FP32

MakeConfig = Callable[..., RLConfig]
REWARD = "tests.rl.rewards_for_tests.nearness"


@pytest.fixture(autouse=True)
def own_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(resolve._NAMED, "_objects", dict(resolve._NAMED._objects))
    return


class Counts(guide.OneAnswer):
    """A workflow with arguments of its own; it remembers how it was made and what it was run for."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, gconfig: GenerationHyperparameters, tokenizer: Any, reward_fn: Any, bonus: float = 0.0) -> None:
        super().__init__(gconfig, tokenizer, reward_fn)
        self.bonus = bonus
        Counts.made.append({"bonus": bonus, "n": self.gconfig.n_samples, "max": self.gconfig.max_new_tokens})

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        result = await super().arun_episode(engine, data)
        return result | {"reward": result["reward"] + self.bonus}


def steps(config: RLConfig) -> list[dict[str, Any]]:
    return read_jsonl(Path(config.run_dir) / "metrics.jsonl")


@pytest.mark.parametrize("named", ["name", "path", "class"])
def test_workflows_are_constructed_with_their_arguments(rl_config: MakeConfig, named: str) -> None:
    register_workflow("counts")(Counts)
    workflow = {"name": "counts", "path": "tests.rl.compat.areal.test_training.Counts", "class": Counts}[named]
    Counts.made.clear()
    config = rl_config(total_steps=1, eval_data={"path": "arithmetic", "split": "test", "limit": 4})
    shared = {"reward_fn": REWARD}
    RLTrainer(config).train(
        workflow=workflow,
        eval_workflow=workflow,
        workflow_kwargs={**shared, "gconfig": config.gconfig, "bonus": 10.0},
        eval_workflow_kwargs={**shared, "bonus": 20.0},
    )
    if named != "path":  # the path's module is another one than this, under pytest
        assert Counts.made == [{"bonus": 10.0, "n": 4, "max": 4}, {"bonus": 20.0, "n": 1, "max": 4}]
    trained, evaluated = (next(row[key] for row in steps(config) if key in row) for key in ("reward", "eval/reward"))
    assert 10 <= trained < 15 and 20 <= evaluated < 25


def test_areals_own_paths_are_those_of_archons_workflows_and_rewards(rl_config: MakeConfig, blank: Path) -> None:
    config = rl_config(total_steps=1)
    metrics = PPOTrainer(config).train(
        workflow="areal.workflow.rlvr.RLVRWorkflow",
        workflow_kwargs={
            "reward_fn": "areal.reward.gsm8k.gsm8k_reward_fn",
            "gconfig": config.gconfig,
            "tokenizer": str(blank),
            "enable_thinking": False,
        },
    )
    assert metrics["reward"] == 0.0  # no answer is boxed


def test_areals_vision_workflow_trains_a_model_that_sees(rl_config: MakeConfig, tmp_path: Path) -> None:
    path = str(write_vision_model(tmp_path / "sight"))
    shapes = {"path": "shapes", "limit": 12}
    config = rl_config(total_steps=1, actor={"path": path, "optimizer": {"lr": 1e-3}}, train_data=shapes)
    vision = "areal.workflow.vision_rlvr.VisionRLVRWorkflow"
    kwargs = {"reward_fn": REWARD, "gconfig": config.gconfig, "tokenizer": path, "processor": path}
    trained = PPOTrainer(config).train(workflow=vision, workflow_kwargs=kwargs)
    assert trained["first_logprob_diff"] < FIRST_RATIO_FP32
    answers = read_jsonl(Path(config.run_dir) / "trajectories.jsonl")
    assert len(answers) == trained["samples"] > 12  # but those that wrote a placeholder themselves
    assert {len(row["images"]) for row in answers} == {1}
    blind = rl_config(run_dir=config.run_dir + "2")
    with pytest.raises(ConfigError, match="VisionRLVRWorkflow needs an image processor"):
        PPOTrainer(blind).train(workflow=vision)


@pytest.mark.parametrize("staleness", [0, 1])
def test_groups_that_the_filter_refuses_are_replaced_by_those_of_other_prompts(
    rl_config: MakeConfig, staleness: int
) -> None:
    rollout = rl_config().rollout.model_dump() | {"max_resamples": 8, "max_staleness": staleness}
    config = rl_config(total_steps=1, rollout=rollout)
    trainer = RLTrainer(config)
    accepted: list[Any] = []

    def accept(group: dict[str, Any]) -> bool:
        accepted.append(bool(group["rewards"].shape == (4,) and len(accepted) % 2))
        return accepted[-1]

    metrics = trainer.train(dynamic_filter_fn=accept)
    assert not all(accepted) and metrics["groups"] == 6
    assert metrics["rollout/filtered_groups"] == metrics["rollout/resampled"] > 0
    if not staleness:
        assert metrics["rollout/episodes"] == len(accepted) == 6 + metrics["rollout/filtered_groups"]


def test_a_filter_that_refuses_all_skips_the_update(rl_config: MakeConfig) -> None:
    metrics = RLTrainer(rl_config(total_steps=1)).train(dynamic_filter_fn="tests.rl.compat.areal.filters.none")
    assert metrics["skipped_update"] == 1.0 and metrics["rollout/filtered_groups"] == metrics["rollout/episodes"]


def test_a_trainer_takes_rows_that_a_script_has_loaded(rl_config: MakeConfig) -> None:
    rows = get_custom_dataset("arithmetic").select(range(40))
    given = rows.map(lambda row: {"messages": [{"role": "user", "content": "7+" + row["prompt"][1:]}]})
    given = given.map(lambda row: {"prompt": row["messages"][0]["content"]}).remove_columns("answer")
    given = given.map(lambda row: {"answer": "1"})
    config = rl_config(total_steps=2)
    with PPOTrainer(config, train_dataset=datasets.Dataset.from_list(list(given)), valid_dataset=given[:4]) as trainer:
        trainer.train()
    assert "eval/reward" in steps(config)[0] and len(trainer.prompts.rows) == 40
    assert all(row["prompt"].startswith("7+") for row in trainer.prompts.rows)
    with pytest.raises(DatasetError, match="valid_dataset is empty"):
        PPOTrainer(config, train_dataset=given, valid_dataset=[])


def test_rows_that_a_loader_has_encoded_are_fine_tuned_on(blank: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(blank)

    def process(sample: dict[str, Any]) -> dict[str, Any]:
        """As the dataset guide encodes a sample."""
        ids = tokenizer.encode(sample["question"] + sample["answer"] + tokenizer.eos_token)
        prompt = tokenizer.encode(sample["question"])
        return {"input_ids": ids, "loss_mask": [0] * len(prompt) + [1] * (len(ids) - len(prompt))}

    rows = datasets.Dataset.from_list([{"question": f"{i}+0=", "answer": str(i)} for i in range(64)])
    rows = rows.map(process).remove_columns(["question", "answer"])
    model = {"path": str(blank), "init_from_scratch": True, "optimizer": {"lr": 1e-2}}
    run = {"run_dir": str(tmp_path / "run"), "total_steps": 30, "batch_size": 16, "eval_every": 15}
    config = SFTConfig.parse(run | {"model": model, "train_data": {"path": "the rows of the script"}})
    with SFTTrainer(config, train_dataset=rows, valid_dataset=rows.select(range(8))) as trainer:
        trainer.train()
    losses = [row["loss"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert losses[-1] < losses[0] / 2
