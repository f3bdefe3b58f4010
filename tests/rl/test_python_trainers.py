"""Trainers in five lines of Python, on rows in memory, as users of TRL write them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from archon.checkpoint.hf_io import load_model
from archon.rl import PreferenceTrainer, RLTrainer, SFTConfig, SFTTrainer
from archon.rl.config import RLConfig
from archon.rl.rewards.lookup import reward_name
from archon.schema.errors import ConfigError, DatasetError, RewardError
from archon.training.metrics import read_jsonl
from tests.rl.rewards_for_tests import DigitReward, count_digits, scaled_digits

SUMS = [{"prompt": f"{i}+{i}=", "response": str(2 * i)} for i in range(12)]


@pytest.fixture
def model(blank: Path) -> dict[str, Any]:
    return {"path": str(blank), "init_from_scratch": True}


def digits_of_lists(completions: list[str], prompts: list[str], level: list[int], **columns: Any) -> list[float]:
    """A reward in TRL's form."""
    assert len(completions) == len(prompts) == len(level) == 1
    return [float(sum(map(str.isdigit, completion))) for completion in completions]


def test_sft(model: dict[str, Any], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(SUMS)
    trainer = SFTTrainer(model=model, train_dataset=rows, run_dir=str(tmp_path / "run"), epochs=2, batch_size=5)
    trainer.train()
    assert trainer.step == 6
    load_model(tmp_path / "run" / "export")
    run = {"model": model, "run_dir": str(tmp_path / "run"), "batch_size": 5, "resume": True}
    again = SFTTrainer(train_dataset=SUMS, epochs=3, **run)
    again.train()
    assert again.step == 9
    other = [*SUMS[:-1], {"prompt": "1+1=", "response": "2"}]
    with pytest.raises(DatasetError, match="cannot resume the data order"):
        SFTTrainer(train_dataset=other, epochs=4, **run).train()


def test_preferences(model: dict[str, Any], tmp_path: Path) -> None:
    pairs = [{"prompt": row["prompt"], "chosen": row["response"], "rejected": "0"} for row in SUMS[1:]]
    run = {"run_dir": str(tmp_path / "run"), "loss": "reward", "batch_size": 4}
    metrics = PreferenceTrainer(model=model, train_dataset=pairs, eval_dataset=pairs[:3], **run).train()
    assert "eval/accuracy" in metrics
    assert load_model(tmp_path / "run" / "export", is_critic=True).score is not None


@pytest.mark.slow
@pytest.mark.parametrize("reward", [count_digits, digits_of_lists, "tests.rl.rewards_for_tests.count_digits"])
def test_rl_with_a_function_as_reward(model: dict[str, Any], tmp_path: Path, reward: Any) -> None:
    prompts = [{"prompt": row["prompt"], "level": 1} for row in SUMS]
    run = {"run_dir": str(tmp_path / "run"), "total_steps": 1, "gconfig": {"n_samples": 4, "max_new_tokens": 3}}
    RLTrainer(model=model, reward=reward, train_dataset=prompts, rollout={"dump_groups": 32}, **run).train()
    samples = read_jsonl(tmp_path / "run" / "trajectories.jsonl")
    assert len(samples) == 128
    assert all(row["reward"] == sum(map(str.isdigit, row["completion"])) for row in samples)
    config = RLConfig.parse(yaml.safe_load((tmp_path / "run" / "config.yaml").read_text()))
    RLTrainer(config.model_copy(update={"resume": True, "total_steps": 2})).train()
    assert len(read_jsonl(tmp_path / "run" / "trajectories.jsonl")) == 256


def test_rows_of_a_hugging_face_dataset_have_no_fields_of_other_rows(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HOME", str(tmp_path))
    calls = [{"city": "Rome"}, {"sum": 2}]
    rows = [{**row, "calls": [{"name": "f", "arguments": call}]} for row, call in zip(SUMS, calls, strict=False)]
    dataset = datasets.Dataset.from_list(rows)
    assert dataset[0]["calls"][0]["arguments"] == {"city": "Rome", "sum": None}
    trainer = SFTTrainer(model=model, train_dataset=dataset, run_dir="~/run")
    assert trainer.config.run_dir == str(tmp_path / "run")
    assert Path(trainer.config.train_data.path).parent == tmp_path / "run" / "data"
    lines = Path(trainer.config.train_data.path).read_text().splitlines()
    assert [json.loads(line)["calls"][0]["arguments"] for line in lines] == calls


def test_arguments_of_trl_are_refused_with_those_of_archon(model: dict[str, Any], tmp_path: Path) -> None:
    run = {"model": model, "train_dataset": SUMS, "run_dir": str(tmp_path / "run")}
    for arguments, message in (
        ({"model": torch.nn.Linear(1, 1)}, "model is an object of type Linear; expected a folder"),
        ({"tokenizer": object()}, "tokenizer is an object of type object; expected a folder"),
        ({"learning_rate": 1e-5}, "unknown argument 'learning_rate'; pass model.optimizer.lr"),
        ({"processing_class": object()}, "unknown argument 'processing_class'; pass tokenizer="),
        ({"peft_config": object()}, "unknown argument 'peft_config'; pass model.lora"),
        ({"output_dir": "x"}, "unknown argument 'output_dir'; pass run_dir="),
        ({"args": object()}, "unknown argument 'args'; pass the fields of the configuration"),
    ):
        with pytest.raises(ConfigError, match=message):
            SFTTrainer(**run | arguments)  # type: ignore[arg-type]
    with pytest.raises(DatasetError, match=r"train_data is a dict with keys train, test; .* such as dataset.'train'."):
        SFTTrainer(**run | {"train_dataset": {"train": SUMS, "test": SUMS}})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reward", "name", "changed"),
    [
        (partial(scaled_digits, scale=2.0), "scaled_digits(scale=2.0)", partial(scaled_digits, scale=3.0)),
        (DigitReward(2.0), "DigitReward()", scaled_digits),
    ],
)
def test_a_reward_object_runs_and_a_resume_names_the_change(
    model: dict[str, Any], tmp_path: Path, reward: Any, name: str, changed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sampling = {"n_samples": 4, "max_new_tokens": 3}
    run = {"model": model, "train_dataset": SUMS, "run_dir": str(tmp_path / "run"), "gconfig": sampling}
    RLTrainer(**run, reward=reward, total_steps=1, rollout={"dump_groups": 32}).train()
    samples = read_jsonl(tmp_path / "run" / "trajectories.jsonl")
    assert all(row["reward"] == 2 * sum(map(str.isdigit, row["completion"])) for row in samples)
    capsys.readouterr()
    RLTrainer(**run, reward=reward, total_steps=2, resume=True).train()
    assert "the reward is" not in capsys.readouterr().out
    RLTrainer(**run, reward=changed, total_steps=3, resume=True).train()
    output = " ".join(capsys.readouterr().out.split())
    assert "warning: the reward is tests.rl.rewards_for_tests.scaled_digits" in output
    assert f"until step 2 it was tests.rl.rewards_for_tests.{name}" in output
    config = RLConfig.parse(
        {"actor": model, "run_dir": str(tmp_path / "x"), "reward": f"tests.rl.{name}"}
        | {"total_steps": 1, "train_data": {"path": str(next((tmp_path / "run" / "data").glob("train*")))}}
    )
    with pytest.raises(RewardError, match="was passed to RLTrainer as an object"):
        RLTrainer(config).train()


def test_the_name_of_a_reward_has_one_short_line_that_does_not_change() -> None:
    def name_of(**arguments: Any) -> str:
        return reward_name(partial(scaled_digits, **arguments))

    judge = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    assert name_of(judge=judge).endswith("scaled_digits(judge=torch.nn.modules.container.Sequential())")
    assert name_of(base=scaled_digits).endswith("scaled_digits(base=tests.rl.rewards_for_tests.scaled_digits)")
    assert name_of(other=object()) == name_of(other=object())
    assert len(name_of(table=[*range(9999)], text="x" * 9999)) < 200


def test_arguments_that_do_not_make_a_run_are_refused(model: dict[str, Any], tmp_path: Path) -> None:
    run = {"run_dir": str(tmp_path / "run")}
    config = SFTConfig.parse(run | {"model": model, "train_data": {"path": "x"}})
    for arguments in (
        {},
        {"model": model, **run},
        {"config": config, "train_dataset": SUMS},
        {"config": config, **run},
    ):
        with pytest.raises(ConfigError, match="pass either a SFTConfig, or model, train_dataset and run_dir"):
            SFTTrainer(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown key 'epoch', did you mean 'epochs'"):
        SFTTrainer(model=model, train_dataset=SUMS, epoch=2, **run)
    with pytest.raises(DatasetError, match="row 0 of train_data cannot be written as JSON"):
        SFTTrainer(model=model, train_dataset=[{"prompt": object()}], **run)
    with pytest.raises(DatasetError, match="the dataset of train_data is empty"):
        SFTTrainer(model=model, train_dataset=[], **run)
    with pytest.raises(RewardError, match="define it at the top level of a module"):
        RLTrainer(model=model, reward=lambda text: 1.0, train_dataset=[{"prompt": "1"}], **run).train()
