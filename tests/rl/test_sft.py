"""Supervised fine-tuning: it learns, its loss is per token whatever the batch, and it resumes bitwise."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.checkpoint.hf_io import load_model
from archon.checkpoint.native import load_latest
from archon.checkpoint.tokenizer import load_tokenizer
from archon.rl import SFTTrainer
from archon.schema.errors import CheckpointError, ConfigError, DatasetError
from archon.training.config import SFTConfig
from archon.training.metrics import read_jsonl
from archon.training.runner import Runner
from archon.training.sft import padded_batch
from tests.rl.failed_update import require_no_checkpoint_of_a_failed_update

MakeConfig = Callable[..., SFTConfig]


@pytest.fixture
def sft_config(blank: Path, tmp_path: Path) -> MakeConfig:
    """A small run on 96 numbers to be reversed and 24 held-out ones; keywords replace sections."""
    for split in ("train", "test"):
        numbers = [i for i in range(120) if (i % 5 == 0) == (split == "test")]
        rows = [{"prompt": f"{i}=", "response": str(i)[::-1]} for i in numbers]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(**changes: Any) -> SFTConfig:
        run = {
            "run_dir": str(tmp_path / "run"),
            "total_steps": 6,
            "batch_size": 16,
            "model": {"path": str(blank), "init_from_scratch": True, "optimizer": {"lr": 5e-3}},
            "train_data": {"path": str(tmp_path)},
            "eval_data": {"path": str(tmp_path), "split": "test"},
            "eval_every": 3,
        }
        return SFTConfig.parse(run | changes)

    return make


def records(config: SFTConfig) -> list[dict[str, Any]]:
    rows = read_jsonl(Path(config.run_dir) / "metrics.jsonl")
    clocked = ("time", "tokens_per_second", "seconds/")
    return [{name: value for name, value in row.items() if not name.startswith(clocked)} for row in rows]


def test_a_row_that_no_micro_batch_can_hold_is_refused_before_the_first_step(sft_config: MakeConfig) -> None:
    config = sft_config()
    config.model.max_tokens_per_mb = 4
    with pytest.raises(ConfigError, match=r"a row of train_data has \d+ tokens, more than model.max_tokens_per_mb = 4"):
        SFTTrainer(config).train()


def test_padded_batch_is_token_aligned_and_keeps_the_order() -> None:
    rows = [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {"input_ids": [8, 9], "loss_mask": [0, 1]}]
    batch = padded_batch(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch["attention_mask"].tolist() == [[True, True, True], [True, True, False]]
    assert batch["loss_mask"].tolist() == [[0, 1, 1], [0, 1, 0]]


def test_sft_lowers_the_held_out_loss_and_exports(sft_config: MakeConfig) -> None:
    config = sft_config(total_steps=12, eval_every=1)
    trainer = SFTTrainer(config)
    trainer.train()
    losses = [row["eval/loss"] for row in records(config) if "eval/loss" in row]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5
    exported = load_model(Path(config.run_dir) / "export")
    assert all(a.equal(b) for a, b in zip(exported.parameters(), trainer.engine.model.parameters(), strict=True))
    assert load_tokenizer(Path(config.run_dir) / "export").eos_token == "<|im_end|>"


def test_evaluation_loss_is_per_token_whatever_the_batch_size(sft_config: MakeConfig, tmp_path: Path) -> None:
    """Rows have 2 to 4 trained tokens: a mean of batch means would depend on who is with whom."""
    measured = []
    for size in (7, 24):
        config = sft_config(batch_size=size, run_dir=str(tmp_path / str(size)))
        with Runner(config.run_dir, config) as runner:
            trainer = SFTTrainer(config, runner)
            trainer.open()
            measured.append(trainer.evaluate())
    assert measured[0].keys() == measured[1].keys() == {"eval/loss", "eval/token_prob"}
    assert measured[0] == pytest.approx(measured[1], rel=1e-6)


def test_sigterm_saves_and_leaves_and_the_resumed_sft_is_bitwise_the_uninterrupted_one(
    sft_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole_config = sft_config(run_dir=str(tmp_path / "whole"))
    whole = SFTTrainer(whole_config)
    whole.train()

    config = sft_config(run_dir=str(tmp_path / "parts"), resume=True)
    with Runner(config.run_dir, config, resume=True) as runner:
        stopped = SFTTrainer(config, runner)
        step = stopped.train_step

        def step_and_signal() -> dict[str, float]:
            if stopped.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return step()

        stopped.train_step = step_and_signal  # type: ignore[method-assign]
        stopped.train()
        assert (stopped.step, runner.exit_code) == (4, 128 + signal.SIGTERM)
    torch.manual_seed(99)  # whatever the new process did before
    resumed = SFTTrainer(config)
    resumed.train()
    assert resumed.step == 6
    capsys.readouterr()
    SFTTrainer(config).train()
    assert "the run has all its 6 steps, and trains no further" in capsys.readouterr().out
    for a, b in zip(resumed.engine.model.parameters(), whole.engine.model.parameters(), strict=True):
        assert a.equal(b)
    assert records(config) == records(whole_config)


def test_error_inside_an_update_saves_no_checkpoint(sft_config: MakeConfig, tmp_path: Path) -> None:
    trainer = SFTTrainer(sft_config(checkpoint={"every": 0}))
    require_no_checkpoint_of_a_failed_update(trainer, trainer.train, tmp_path / "run" / "checkpoints")


def test_error_between_steps_saves_the_last_complete_step(sft_config: MakeConfig, tmp_path: Path) -> None:
    """Nothing of step 3 has begun when the error is raised, so the weights are those of step 2."""
    trainer = SFTTrainer(sft_config(checkpoint={"every": 0}))
    step = trainer.train_step

    def failing_step() -> dict[str, float]:
        if trainer.step == 2:
            raise OSError("the data is gone")
        return step()

    trainer.train_step = failing_step  # type: ignore[method-assign]
    with pytest.raises(OSError, match="the data is gone"):
        trainer.train()
    saved = load_latest(tmp_path / "run" / "checkpoints")
    assert saved is not None and saved[0] == 2


def test_epochs_train_every_row_once_each(sft_config: MakeConfig) -> None:
    """96 rows are 40 + 40 + 16; every row has the prompt's number and is counted by it."""
    config = sft_config(total_steps=None, epochs=2, batch_size=40, eval_data=None)
    trainer, passes = SFTTrainer(config), Counter[tuple[int, ...]]()
    local_batch = trainer._local_batch

    def counted(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        passes.update(tuple(row["input_ids"]) for row in rows)
        return local_batch(rows)

    trainer._local_batch = counted  # type: ignore[method-assign]
    trainer.train()
    assert trainer.step == 6
    assert len(passes) == 96 and set(passes.values()) == {2}


def test_a_run_of_epochs_is_not_resumed_with_another_batch_size(sft_config: MakeConfig) -> None:
    SFTTrainer(sft_config(total_steps=2)).train()
    with pytest.raises(ConfigError, match="step 2 was trained with another batch_size than 40"):
        SFTTrainer(sft_config(total_steps=None, batch_size=40, resume=True)).train()
    resumed = SFTTrainer(sft_config(total_steps=3, batch_size=40, resume=True))
    resumed.train()
    assert resumed.loader.state_dict()["cursor"] == 72


DATED = """{{ strftime_now('%d%m%Y') }}{% for message in messages %}
{{- message['content'] }}{% if message['role'] == 'assistant' %}<|im_end|>{% endif %}
{%- endfor %}"""


def test_a_run_is_resumed_on_another_day_but_not_with_other_data(
    sft_config: MakeConfig, blank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(blank)
    tokenizer.chat_template = DATED
    tokenizer.save_pretrained(tmp_path / "dated")
    changes = {"tokenizer": str(tmp_path / "dated"), "eval_data": None, "resume": True}
    data = {"path": str(tmp_path / "train.jsonl")}

    def resume(step: int, **data_changes: Any) -> SFTTrainer:
        trainer = SFTTrainer(sft_config(total_steps=step, train_data=data | data_changes, **changes))
        trainer.train()
        return trainer

    def ids(trainer: SFTTrainer) -> list[int]:
        return list(trainer.loader.row_at(0)["input_ids"])  # type: ignore[union-attr]

    today = resume(1)
    monkeypatch.setenv("TZ", "UTC-14")
    time.tzset()
    first = ids(resume(2))
    monkeypatch.setenv("TZ", "UTC+14")
    time.tzset()
    second = ids(resume(3))
    monkeypatch.undo()
    time.tzset()
    assert first != second, "the two time zones have different dates at all times"
    assert today.step == 1
    with pytest.raises(DatasetError, match="cannot resume the data order"):
        resume(4, system_prompt="0=")
    rows = Path(data["path"]).read_text()
    for old, new in (('"prompt": "1="', '"prompt": "1+"'), ('"response": "1"', '"response": "2"')):
        assert old in rows
        Path(data["path"]).write_text(rows.replace(old, new))
        with pytest.raises(DatasetError, match="cannot resume the data order"):
            resume(4)
    Path(data["path"]).write_text(rows)
    Path(data["path"]).rename(tmp_path / "moved.jsonl")
    assert resume(4, path=str(tmp_path / "moved.jsonl")).step == 4


def test_resume_from_another_models_checkpoint_is_refused(sft_config: MakeConfig, blank: Path, tmp_path: Path) -> None:
    SFTTrainer(sft_config(total_steps=1)).train()
    other = tmp_path / "other"
    other.mkdir()
    for file in blank.iterdir():
        content = file.read_text()
        (other / file.name).write_text(content.replace('"intermediate_size": 48', '"intermediate_size": 40'))
    config = sft_config(total_steps=2, resume=True, model={"path": str(other), "init_from_scratch": True})
    with pytest.raises(CheckpointError, match="another model: hidden_dim is 48 there and 40 here"):
        SFTTrainer(config).train()


def test_every_period_counts_complete_steps(sft_config: MakeConfig, tmp_path: Path) -> None:
    """Evaluations follow steps 2, 4 and the last; checkpoints follow steps 2 and 4, and the end saves step 5."""
    config = sft_config(total_steps=5, eval_every=2, checkpoint={"every": 2, "keep": 9})
    SFTTrainer(config).train()
    assert [row["step"] for row in records(config) if "eval/loss" in row] == [2, 4, 5]
    folders = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert [int(folder.name.removeprefix("step-")) for folder in folders] == [2, 4, 5]


def test_learning_rate_reaches_the_end_of_its_schedule_with_the_run(sft_config: MakeConfig) -> None:
    """12 steps of 2 epochs, linearly to 0 behind the last step."""
    config = sft_config(total_steps=None, epochs=2, eval_data=None)
    config.model.scheduler.kind, config.model.scheduler.min_lr_ratio = "linear", 0.0
    SFTTrainer(config).train()
    rates = [row["lr"] for row in records(config)]
    assert rates == pytest.approx([5e-3 * (12 - step) / 12 for step in range(12)])


def test_resumed_run_whose_target_was_reached_takes_no_further_step(sft_config: MakeConfig) -> None:
    def reached_after_two(engine: object, step: int) -> tuple[dict[str, float], bool]:
        return {}, step == 2

    SFTTrainer(sft_config(), probe=reached_after_two).train()
    resumed = SFTTrainer(sft_config(resume=True), probe=reached_after_two)
    resumed.train()
    assert resumed.step == 2


def test_rows_beyond_the_models_positions_and_evaluation_on_training_rows_are_warned_of(
    sft_config: MakeConfig, blank: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    positions = json.loads((blank / "config.json").read_text())["max_position_embeddings"]
    with (tmp_path / "train.jsonl").open("a") as rows:
        rows.write(json.dumps({"prompt": "1" * positions, "response": "1"}) + "\n")
    config = sft_config(total_steps=1, eval_data={"path": str(tmp_path), "split": "train"})
    SFTTrainer(config).train()
    assert f"1 of 97 rows are longer than the model's {positions} positions" in caplog.text
    assert "eval_data starts with the first row of train_data" in caplog.text


def test_held_out_rows_are_not_the_training_rows_unless_that_is_asked_for(
    sft_config: MakeConfig, tmp_path: Path
) -> None:
    file = next(tmp_path.glob("*.jsonl"))
    for train, held_out, split in [
        ({"path": "gsm8k"}, {"path": "gsm8k"}, "test"),
        ({"path": str(tmp_path)}, {"path": str(tmp_path), "limit": 8}, "test"),
        ({"path": str(tmp_path)}, {"path": str(tmp_path), "split": "train"}, "train"),
        ({"path": str(file)}, {"path": str(file), "split": "train"}, "train"),
        ({"path": "gsm8k"}, {"path": "arithmetic"}, "train"),
    ]:
        config = sft_config(train_data=train, eval_data=held_out)
        assert config.eval_data is not None and (config.train_data.split, config.eval_data.split) == ("train", split)
    with pytest.raises(ConfigError, match=r"eval_data.*is also the path of train_data.*set eval_data\.split"):
        sft_config(train_data={"path": str(file)}, eval_data={"path": str(file)})
