"""Resume of LoRA training through the trainers: the trained LoRA continues, not a fresh one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from archon.rl import RLTrainer
from archon.training.config import PreferenceConfig, SFTConfig
from archon.training.loop import BaseTrainer
from archon.training.preference import PreferenceTrainer
from archon.training.runner import Runner
from archon.training.sft import SFTTrainer
from tests.lora.tiny import LORA, rl_run

MakeTrainer = Callable[..., BaseTrainer]


def supervised(checkpoint: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    model = {"path": str(checkpoint), "device": "cpu", "optimizer": {"lr": 1e-2}, "lora": LORA}
    common = {"run_dir": str(run_dir), "total_steps": 4, "batch_size": 8, "eval_every": 0, "model": model}
    return common | changes


def sft(checkpoint: Path, run_dir: Path, **changes: Any) -> SFTTrainer:
    data = {"train_data": {"path": "python:tests.lora.test_resume.answers"}}
    return SFTTrainer(SFTConfig.parse(supervised(checkpoint, run_dir, **data, **changes)))


def dpo(checkpoint: Path, run_dir: Path, **changes: Any) -> PreferenceTrainer:
    data = {"train_data": {"path": "python:tests.lora.tiny.pairs"}}
    return PreferenceTrainer(PreferenceConfig.parse(supervised(checkpoint, run_dir, **data, **changes)))


def rl(checkpoint: Path, run_dir: Path, **changes: Any) -> RLTrainer:
    return RLTrainer(rl_run(checkpoint, run_dir, **changes))


def answers(split: str) -> list[dict[str, str]]:
    """Return SFT rows, for `python:tests.lora.test_resume.answers`."""
    return [{"prompt": f"{n}+{n}=", "response": str(2 * n)} for n in range(1, 20)]


def lora_of(trainer: BaseTrainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.engine.lora_weights()}


@pytest.mark.parametrize("make", [sft, dpo, rl])
def test_resumed_training_is_bitwise_the_uninterrupted_one(make: Any, checkpoint: Path, tmp_path: Path) -> None:
    whole = make(checkpoint, tmp_path / "whole")
    whole.train()
    first = make(checkpoint, tmp_path / "parts", total_steps=2)
    first.train()
    resumed = make(checkpoint, tmp_path / "parts", resume=True)
    resumed.train()
    middle, expected, found = lora_of(first), lora_of(whole), lora_of(resumed)
    assert resumed.step == 4 and expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert found[name].equal(tensor), name
        assert not middle[name].equal(tensor), f"{name} does not train after the resume"


def test_resumed_rl_generates_with_its_trained_lora(checkpoint: Path, tmp_path: Path) -> None:
    first = rl(checkpoint, tmp_path / "run", total_steps=2)
    first.train()
    expected = lora_of(first)
    resumed = rl(checkpoint, tmp_path / "run", resume=True)
    with Runner(resumed.config.run_dir, resumed.config, resume=True) as runner:
        resumed.runner = runner
        with resumed.opened():
            generated = dict(resumed.generator.model.named_parameters())
            assert resumed.step == resumed.generator.version == 2
    for name, tensor in expected.items():
        assert generated[name].equal(tensor), name
