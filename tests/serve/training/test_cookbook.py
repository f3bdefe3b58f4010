"""Recipes of tinker-cookbook, unmodified, on a training service.

`ARCHON_RECIPE_STEPS` sets their number of steps, and `ARCHON_RECIPE_BASE` the checkpoint, with rows of GSM8K:

    export ARCHON_RECIPE_STEPS=20 ARCHON_RECIPE_BASE=.real/SmolLM2-135M-Instruct
    pytest -s tests/serve/training/test_cookbook.py
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from archon.rl.bootstrap import make_tokenizer
from archon.training.config import TokenizerRecipe
from tests.conftest import find_data
from tests.serve.training.conftest import ROOT, running
from tests.small_qwen3 import SMALL_QWEN3

pytest.importorskip("tinker_cookbook")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("training_service")]

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
"""A name for which the cookbook knows a chat format; here it is a folder with a tiny model."""
STEPS = int(os.environ.get("ARCHON_RECIPE_STEPS", "3"))
BASE = os.environ.get("ARCHON_RECIPE_BASE")
"""A checkpoint to train in place of the tiny model; its chat format is ChatML, like that of `MODEL`."""
LIMITS = [f"max_steps={STEPS}", "lora_rank=4", f"learning_rate={'1e-4' if BASE else '1e-2'}"]
RL = [*LIMITS, "loss_fn=importance_sampling", "max_tokens=16"]
RENDERER = "renderer_name=qwen3_instruct"
TRAINER = [f"model_name={MODEL}", "behavior_if_log_dir_exists=delete"]


@dataclass(frozen=True)
class Recipe:
    """A recipe: arguments, the metric of each step, and whether it falls from the first step to the last."""

    arguments: list[str]
    metric: str
    falls: bool = False


RECIPES = {
    "sl_loop": Recipe([f"model_name={MODEL}", *LIMITS, "batch_size=4", "max_length=256"], "train_mean_nll", True),
    "rl_loop": Recipe([f"model_name={MODEL}", *RL, "batch_size=2", "group_size=4"], "reward/total"),
    "sl_basic": Recipe(
        [
            *(f"model_name={MODEL}", *LIMITS, "eval_every=0"),
            "dataset_builder=tinker_cookbook.recipes.chat_sl.chat_datasets:NoRobotsBuilder",
            f"dataset_builder.common_config.model_name_for_tokenizer={MODEL}",
            *(f"dataset_builder.common_config.{part}" for part in (RENDERER, "batch_size=4", "max_length=256")),
        ],
        "train_mean_nll",
        True,
    ),
    "rl_basic": Recipe(
        [
            *(f"model_name={MODEL}", *RL),
            "dataset_builder=tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder",
            f"dataset_builder.model_name_for_tokenizer={MODEL}",
            *(f"dataset_builder.{part}" for part in (RENDERER, "batch_size=2", "group_size=4")),
        ],
        "env/all/reward/total",
    ),
    "math_rl.train": Recipe(
        [*TRAINER, *RL, "env=arithmetic", "groups_per_batch=4", "group_size=4", "eval_every=0"],
        "env/all/reward/total",
    ),
    "preference.dpo.train": Recipe(
        [*TRAINER, *(part for part in LIMITS if "rank" not in part), "dataset=hhh", "batch_size=4", "max_length=256"],
        "dpo_loss",
        True,
    ),
}
FRONT_MATTER = """---
configs:
- config_name: {}
  data_files:
  - split: train
    path: train.jsonl
  - split: test
    path: test.jsonl
---
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory in which the recipes' model and datasets are local folders."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("recipes")
    alphabet = "\n" + "".join(map(chr, range(32, 127)))
    tokenizer = make_tokenizer(TokenizerRecipe(kind="characters", alphabet=alphabet, chat_template="chatml"))
    torch.manual_seed(0)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen3Config(**{**SMALL_QWEN3, "max_position_embeddings": 2048, "vocab_size": len(tokenizer)}, **ids)
    if BASE is None:
        Qwen3ForCausalLM(config).save_pretrained(folder / MODEL)
        tokenizer.save_pretrained(folder / MODEL)
    else:
        (folder / MODEL).parent.mkdir(parents=True)
        (folder / MODEL).symlink_to(Path(BASE).resolve())
    draw = random.Random(0)
    sums = [(draw.randrange(50), draw.randrange(50)) for _ in range(200)]
    rows = {
        "openai/gsm8k": ("main", [{"question": f"{a} + {b}?", "answer": f"Add.\n#### {a + b}"} for a, b in sums]),
        "HuggingFaceH4/no_robots": (
            "default",
            [
                {"messages": [{"role": "user", "content": f"{a} + {b}"}, {"role": "assistant", "content": f"{a + b}"}]}
                for a, b in sums
            ],
        ),
        "Anthropic/hh-rlhf": (
            "default",
            [
                {
                    "chosen": f"\n\nHuman: {a} + {b}?\n\nAssistant: {a + b}",
                    "rejected": f"\n\nHuman: {a} + {b}?\n\nAssistant: no",
                }
                for a, b in sums
            ],
        ),
    }
    if BASE is not None:
        data_dir = find_data()
        assert data_dir is not None
        lines = (data_dir / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()
        rows["openai/gsm8k"] = ("main", [json.loads(line) for line in lines[:200]])
    for name, (config_name, items) in rows.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "README.md").write_text(FRONT_MATTER.format(config_name))
        for split, part in (("train", items[:180]), ("test", items[180:])):
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in part))
    return folder


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[str]:
    with running(folder / MODEL, folder / "state", f"model_name={MODEL}") as (url, _):
        yield url


@pytest.mark.unsampled
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs(name: str, folder: Path, service: str) -> None:
    recipe, log = RECIPES[name], folder / f"log-{name}"
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{name}", f"base_url={service}", f"log_path={log}"]
    environment = os.environ | {
        "TINKER_API_KEY": "tml-recipes",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [*command, *recipe.arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    metrics = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    values = [row[recipe.metric] for row in metrics if recipe.metric in row]
    assert len(values) >= STEPS, sorted(metrics[-1])
    if recipe.falls:
        assert values[-1] < values[0], values
    print(name, *(f"{value:.4f}" for value in values))
