"""Does a model learn with 8-bit products what it learns in bfloat16? SFT of the arithmetic demo's model for 200 steps.

    python -m benchmarks.fp8_learning                       # every run, and the record
    python -m benchmarks.fp8_learning --seeds 1 --steps 20 --record trial.jsonl

Each seed draws its own weights and order of rows; the three runs of a seed begin with the same weights and see the same
rows. A line of the record is one run: the held-out loss before and after, and how far that after is from bfloat16's
(`apart`), which is expected to be at most 1 %. Products are emulated on a CPU. The command ends with 1 where one is
further.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from archon.bench.origin import commit
from archon.rl.bootstrap import write_blank
from archon.training.config import BootstrapConfig, SFTConfig
from archon.training.runner import Runner
from archon.training.sft import SFTTrainer
from benchmarks.harness import ROOT, say

RECORD = ROOT / "benchmarks" / "records" / "fp8_learning.jsonl"
BOOTSTRAP = ROOT / "rl" / "recipes" / "arithmetic_bootstrap.yaml"
RECIPES = ("none", "tensorwise", "rowwise")
STEPS, SEEDS, APART = 200, 3, 0.01


def train(fp8: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """Returns the held-out losses of a run, and its seconds."""
    recipe = yaml.safe_load(BOOTSTRAP.read_text(encoding="utf-8"))
    warmup = recipe.pop("warmup")
    blank = folder / f"blank-{seed}"
    if not blank.exists():
        write_blank(BootstrapConfig.model_validate(recipe), blank)
    run_dir = folder / f"{fp8}-{seed}"
    config = SFTConfig.model_validate(
        {
            "run_dir": str(run_dir),
            "seed": seed,
            "total_steps": steps,
            "batch_size": warmup["batch_size"],
            "eval_every": steps,
            "model": {
                "path": str(blank),
                "init_from_scratch": True,
                "seed": seed,
                "device": "cpu",
                "dtype": "bfloat16",
                "fp8": fp8,
                "optimizer": warmup["optimizer"],
                "scheduler": warmup["scheduler"],
            },
            "train_data": warmup["train_data"],
            "eval_data": {"path": "arithmetic", "split": "test", "limit": 500},
            "checkpoint": {"every": 0},
        }
    )
    started = time.monotonic()
    with Runner(run_dir, config, resume=False) as runner:
        trainer = SFTTrainer(config, runner)
        trainer.open()
        before = trainer.evaluate()["eval/loss"]
        for _ in range(steps):
            trainer.train_step()
        after = trainer.evaluate()["eval/loss"]
    seconds = round(time.monotonic() - started, 1)
    return {"fp8": fp8, "seed": seed, "steps": steps, "before": before, "after": after, "seconds": seconds}


def main() -> int:
    """Makes every run. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=RECORD, help="JSON lines, overwritten")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of weights and of the order of rows")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of a run")
    options = parser.parse_args()
    missed = 0
    made = {"torch": torch.__version__, "commit": commit()}
    with tempfile.TemporaryDirectory() as folder, options.record.open("w", encoding="utf-8") as record:
        for seed in range(options.seeds):
            base = 0.0
            for fp8 in RECIPES:
                line = train(fp8, seed, options.steps, Path(folder))
                base = line["after"] if fp8 == "none" else base
                line |= {"apart": abs(line["after"] - base) / base, "threads": torch.get_num_threads()} | made
                line["reached"] = line["apart"] <= APART
                missed += not line["reached"]
                record.write(json.dumps(line) + "\n")
                record.flush()
                say(f"{fp8}, seed {seed}: {line['before']:.4f} to {line['after']:.4f}, {line['apart']:.2%} apart")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
