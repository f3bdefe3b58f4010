"""Recipes of tinker-cookbook, unmodified, on a training service: `ARCHON_RECIPE_STEPS` sets their number of steps."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from archon.rl.bootstrap import make_tokenizer
from archon.training.config import TokenizerRecipe
from tests.serve.training.conftest import ROOT, running
from tests.small_qwen3 import SMALL_QWEN3

pytest.importorskip("tinker_cookbook")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("training_service")]

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
"""A name for which the cookbook knows a chat format; here it is a folder with a tiny model."""
STEPS = int(os.environ.get("ARCHON_RECIPE_STEPS", "20"))
COMMON = [f"model_name={MODEL}", f"max_steps={STEPS}", "lora_rank=4", "learning_rate=1e-2"]
RECIPES = {
    "sl_loop": [*COMMON, "batch_size=4", "max_length=256"],
    "rl_loop": [*COMMON, "batch_size=2", "group_size=4", "max_tokens=8", "loss_fn=importance_sampling"],
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
    config = Qwen3Config(**{**SMALL_QWEN3, "max_position_embeddings": 1024, "vocab_size": len(tokenizer)}, **ids)
    Qwen3ForCausalLM(config).save_pretrained(folder / MODEL)
    tokenizer.save_pretrained(folder / MODEL)
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
    }
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


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs(recipe: str, folder: Path, service: str) -> None:
    log = folder / f"log-{recipe}"
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}", f"base_url={service}", f"log_path={log}"]
    environment = os.environ | {
        "TINKER_API_KEY": "tml-recipes",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [*command, *RECIPES[recipe]], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    metrics = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) >= STEPS
    key = "reward/total" if recipe == "rl_loop" else "train_mean_nll"
    values = [row[key] for row in metrics if key in row]
    assert len(values) >= STEPS, sorted(metrics[-1])
    if recipe == "sl_loop":
        assert values[-1] < values[0]
