"""Whole runs, small, as rank processes make them: what each rank is left with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from archon.rl import RLTrainer, SFTTrainer, make_trainer
from archon.rl.bootstrap import write_blank
from archon.rl.config import RLConfig
from archon.training.config import BootstrapConfig, SFTConfig, TokenizerRecipe
from tests.small_qwen3 import SMALL_QWEN3


def make_inputs(folder: Path) -> None:
    """A model without weights, its tokenizer of 16 tokens, and numbers to be reversed."""
    recipe = TokenizerRecipe(kind="characters", alphabet="0123456789+= ", chat_template="plain")
    write_blank(BootstrapConfig(hf_config=SMALL_QWEN3, tokenizer=recipe), folder / "blank")
    for split, numbers in (("train", range(90)), ("test", range(90, 113))):
        rows = [{"prompt": f"{i}=", "response": str(i)[::-1]} for i in numbers]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _model(folder: Path, layout: str) -> dict[str, Any]:
    path = str(folder / "blank")
    return {
        "path": path,
        "device": "cpu",
        "layout": layout,
        "init_from_scratch": True,
        "optimizer": {"lr": 1e-3},
        "scheduler": {"kind": "constant"},
    }


def sft_config(folder: Path, layout: str, **changes: Any) -> SFTConfig:
    """Five rows more than a multiple of the batch are held out, so that evaluation ends with a rest."""
    run = {
        "run_dir": str(folder / f"sft-{layout}"),
        "total_steps": 4,
        "batch_size": 9,
        "model": _model(folder, layout),
        "train_data": {"path": str(folder)},
        "eval_data": {"path": str(folder), "split": "test"},
        "eval_every": 2,
    }
    return SFTConfig.parse(run | changes)


def rl_config(folder: Path, layout: str, **changes: Any) -> RLConfig:
    run = {
        "run_dir": str(folder / f"rl-{layout}"),
        "total_steps": 3,
        # One process alone could share common beginnings, which rounds otherwise.
        "actor": _model(folder, layout) | {"share_prefixes": False},
        "ref": {"path": str(folder / "blank"), "device": "cpu", "init_from_scratch": True, "share_prefixes": False},
        "algorithm": {"kl": {"coef": 0.1}, "zero_variance_groups": "resample", "minibatches": 2},
        "gconfig": {"n_samples": 4, "max_new_tokens": 4},
        "rollout": {"prompts_per_step": 5, "n_gold_checks": 4, "dump_groups": 5, "workers": {"rewards": 1}},
        "generator": {"max_slots": 32, "page_size": 8},
        "train_data": {"path": "arithmetic"},
        "eval_data": {"path": "arithmetic", "split": "test"},
        "evaluation": {"every": 2, "max_prompts": 7},
        "reward": "tests.rl.rewards_for_tests.nearness",
        "verify_export": True,
    }
    return RLConfig.parse(run | changes)


def train_sft(folder: str, layout: str, changes: dict[str, Any]) -> dict[str, Tensor]:
    """The weights after the run."""
    trainer = SFTTrainer(sft_config(Path(folder), layout, **changes))
    trainer.train()
    return {name: tensor.clone() for name, tensor in trainer.engine.weights()}


def train_rl(folder: str, layout: str, changes: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of this process's generator after the run."""
    trainer = RLTrainer(rl_config(Path(folder), layout, **changes))
    trainer.train()
    return {name: tensor.clone() for name, tensor in trainer.generator.model.named_parameters()}


def modes_config(folder: Path, mode: str, layout: str, step: int) -> RLConfig:
    """An explorer, or a trainer of its buffer, that ends after `step`, resumed where it has begun."""
    experiences = {"path": str(folder / "buffer.db"), "weights_from": str(folder / "train"), "passes": 2}
    changes: dict[str, Any] = {"mode": mode, "run_dir": str(folder / mode), "total_steps": step, "resume": True}
    changes |= {"experiences": experiences, "checkpoint": {"every": 1}}
    if mode == "explore":
        changes["algorithm"] = {"kl": {"coef": 0.0}}
    return rl_config(folder, layout, **changes)


def explore_and_train(folder: str, explorer: str, trainer: str) -> None:
    """In turns: each explores and trains one step, then another, after which the trainer has all passes left."""
    for mode, layout, step in (("explore", explorer, 1), ("train", trainer, 1), ("explore", explorer, 2)):
        make_trainer(modes_config(Path(folder), mode, layout, step)).train()
    make_trainer(modes_config(Path(folder), "train", trainer, 20)).train()
