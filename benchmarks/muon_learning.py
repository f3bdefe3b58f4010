"""Compare the steps that Muon and AdamW need: SFT of the arithmetic demo's model from fresh weights.

    python -m benchmarks.muon_learning                       # every run, and the record
    python -m benchmarks.muon_learning --seeds 1 --steps 40 --record trial.jsonl

Batches, model, weight decay and schedule are those of the demo's warm-up. Each optimizer first gets its best learning
rate, the one with the lowest held-out loss of seed 0. A seed is an order of rows. A line of the record is one run with
its held-out losses by step. The last line gives, for each seed, the first evaluated step at which Muon is at or below
AdamW's final loss. The exit code is 1 if Muon needs as many steps as AdamW on average.
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

from archon.rl.bootstrap import write_blank
from archon.tools.bench.origin import commit
from archon.training.config import BootstrapConfig, SFTConfig
from archon.training.runner import Runner
from archon.training.sft import SFTTrainer
from benchmarks.fp8_learning import RECIPES
from benchmarks.harness import ROOT, say

RECORD = ROOT / "benchmarks" / "records" / "muon_learning.jsonl"
RATES = (3e-4, 1e-3, 3e-3)
STEPS, EVERY, SEEDS = 300, 20, 3


def train(kind: str, lr: float, seed: int, steps: int, start: Path, folder: Path) -> dict[str, Any]:
    """Return the held-out losses of a run by step, and its seconds."""
    warmup = yaml.safe_load((RECIPES / "arithmetic_bootstrap.yaml").read_text(encoding="utf-8"))["warmup"]
    config = SFTConfig.model_validate(
        {
            "run_dir": str(folder / f"{kind}-{lr}-{seed}"),
            "seed": seed,
            "total_steps": steps,
            "batch_size": warmup["batch_size"],
            "model": {
                "path": str(start),
                "device": "cpu",
                "init_from_scratch": True,
                "optimizer": warmup["optimizer"] | {"kind": kind, "lr": lr},
                "scheduler": warmup["scheduler"],
            },
            "train_data": warmup["train_data"],
            "eval_data": {"path": "arithmetic", "split": "test", "limit": 500},
            "checkpoint": {"every": 0},
        }
    )
    losses, started = {}, time.monotonic()
    with Runner(config.run_dir, config, resume=False) as runner:
        trainer = SFTTrainer(config, runner)
        trainer.open()
        for step in range(1, steps + 1):
            trainer.train_step()
            if step % EVERY == 0:
                losses[step] = trainer.evaluate()["eval/loss"]
    return {"kind": kind, "lr": lr, "seed": seed, "losses": losses, "seconds": round(time.monotonic() - started, 1)}


def main() -> int:
    """Make every run. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=RECORD, help="JSON lines, overwritten")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of the order of rows")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of a run, a multiple of 20")
    options = parser.parse_args()
    made = {"threads": torch.get_num_threads(), "torch": torch.__version__, "commit": commit()}
    final: dict[tuple[str, float, int], float] = {}
    curves: dict[tuple[str, float, int], dict[int, float]] = {}
    with tempfile.TemporaryDirectory() as folder, options.record.open("w", encoding="utf-8") as record:
        recipe = yaml.safe_load((RECIPES / "arithmetic_bootstrap.yaml").read_text(encoding="utf-8"))
        start = Path(folder) / "start"
        write_blank(BootstrapConfig.model_validate(recipe | {"warmup": None}), start)

        def run(kind: str, lr: float, seed: int) -> None:
            line = train(kind, lr, seed, options.steps, start, Path(folder))
            curves[kind, lr, seed] = line["losses"]
            final[kind, lr, seed] = line["losses"][options.steps]
            record.write(json.dumps(line | made) + "\n")
            record.flush()
            say(f"{kind}, lr {lr:g}, seed {seed}: {final[kind, lr, seed]:.4f} in {line['seconds']} s")

        best = {}
        for kind in ("adamw", "muon"):
            for lr in RATES:
                run(kind, lr, 0)
            best[kind] = min(RATES, key=lambda lr: final[kind, lr, 0])
            for seed in range(1, options.seeds):
                run(kind, best[kind], seed)
        reached = [
            _first_step(curves["muon", best["muon"], s], final["adamw", best["adamw"], s]) for s in range(options.seeds)
        ]
        summary = {"steps": options.steps, "muon_reached_at": reached, "lr": best}
        record.write(json.dumps(summary | made) + "\n")
    say(f"Muon reaches AdamW's loss after {reached} of {options.steps} steps")
    return int(None in reached or sum(filter(None, reached)) >= options.steps * len(reached))


def _first_step(losses: dict[int, float], loss: float) -> int | None:
    return next((step for step, value in losses.items() if value <= loss), None)


if __name__ == "__main__":
    sys.exit(main())
