"""Compare learning with FP8 matmuls and with bfloat16: SFT of the arithmetic demo's model for 200 steps.

    python -m benchmarks.fp8_learning                       # every run, and the record
    python -m benchmarks.fp8_learning --seeds 1 --steps 20 --record trial.jsonl

Runs start from the checkpoint on which the demo starts RL, with the demo's optimizer and schedule. From fresh weights
the loss would still fall steeply after 200 steps, and would measure how soon a model learns instead of how well. A seed
is an order of rows.

A line of the record is one run: the held-out loss before and after, and the relative difference of the final loss from
bfloat16 (`apart`). An FP8 run computes this loss in FP8; `in_bfloat16` is the loss of its weights in bfloat16, as
exported, and `learned_apart` its difference. A second bfloat16 run with smaller micro-batches differs by rounding only
and shows the noise. FP8 is applied to all four blocks, or to the two inner blocks. A CPU emulates FP8 matmuls.

The last lines give the mean of |`apart`| over the seeds; the aim is at most 1 %. The exit code is 1 if a recipe misses
it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
import yaml

from archon.engine.threads import use_all_threads
from archon.models.layers.linear import Linear
from archon.rl.bootstrap import ensure_checkpoint
from archon.schema.config import EngineConfig, merge_sections
from archon.tools.bench.origin import commit
from archon.training.config import BootstrapConfig, SFTConfig
from archon.training.runner import Runner
from archon.training.sft import SFTTrainer
from benchmarks.harness import ROOT, say

RECORD = ROOT / "benchmarks" / "records" / "fp8_learning.jsonl"
RECIPES = ROOT / "rl" / "recipes"
BASE = "bfloat16"
RUNS: dict[str, dict[str, Any]] = {
    BASE: {},
    "bfloat16 in smaller micro-batches": {"max_tokens_per_mb": 512},
    "tensorwise": {"fp8": "tensorwise"},
    "rowwise": {"fp8": "rowwise"},
    "tensorwise, first and last block in bfloat16": {"fp8": "tensorwise_inner"},
    "rowwise, first and last block in bfloat16": {"fp8": "rowwise_inner"},
}
STEPS, SEEDS, APART = 200, 3, 0.01


def make_start(folder: Path) -> Path:
    """Train the checkpoint from which every run starts; return its folder."""
    start = folder / "start"
    recipe = yaml.safe_load((RECIPES / "arithmetic_bootstrap.yaml").read_text(encoding="utf-8"))
    ensure_checkpoint(BootstrapConfig.model_validate(recipe), start, like=EngineConfig(path=str(start), device="cpu"))
    return start


def train(name: str, changes: dict[str, Any], seed: int, steps: int, start: Path, folder: Path) -> dict[str, Any]:
    """Return the held-out losses of a run with `changes` of the demo's model section, and its seconds."""
    warmup = yaml.safe_load((RECIPES / "arithmetic_bootstrap.yaml").read_text(encoding="utf-8"))["warmup"]
    demo = yaml.safe_load((RECIPES / "arithmetic_cpu.yaml").read_text(encoding="utf-8"))["actor"]
    scheduler = demo["scheduler"] | {"warmup_steps": min(demo["scheduler"]["warmup_steps"], steps // 4)}
    model = {"path": str(start), "device": "cpu", "dtype": "bfloat16", "optimizer": demo["optimizer"]}
    config = SFTConfig.model_validate(
        {
            "run_dir": str(folder / f"{name}-{seed}"),
            "seed": seed,
            "total_steps": steps,
            "batch_size": warmup["batch_size"],
            "eval_every": steps,
            "model": merge_sections(model | {"scheduler": scheduler}, changes),
            "train_data": warmup["train_data"],
            "eval_data": {"path": "arithmetic", "split": "test", "limit": 500},
            "checkpoint": {"every": 0},
        }
    )
    started = time.monotonic()
    with Runner(config.run_dir, config, resume=False) as runner:
        trainer = SFTTrainer(config, runner)
        trainer.open()
        before = trainer.evaluate()["eval/loss"]
        for _ in range(steps):
            trainer.train_step()
        after = trainer.evaluate()["eval/loss"]
        for module in trainer.engine.full_model.modules():
            if isinstance(module, Linear):
                module.fp8 = None
        in_bfloat16 = trainer.evaluate()["eval/loss"]
    seconds = round(time.monotonic() - started, 1)
    losses = {"before": before, "after": after, "in_bfloat16": in_bfloat16}
    return {"run": name, "seed": seed, "steps": steps, **losses, "seconds": seconds}


def write_means(record: TextIO, apart: Mapping[str, Sequence[float]], made: Mapping[str, str]) -> int:
    """Record the mean |`apart`| of each run over the seeds. Return 1 if one is above `APART`."""
    means = {name: sum(map(abs, values)) / len(values) for name, values in apart.items()}
    for name, mean in means.items():
        line = {"run": name, "mean_apart": mean, "reached": mean <= APART, "expected": APART, **made}
        record.write(json.dumps(line) + "\n")
        say(f"{name}: {mean:.2%} apart, {'within' if mean <= APART else 'not within'} {APART:.0%}")
    return int(max(means.values()) > APART)


def main() -> int:
    """Make every run. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=RECORD, help="JSON lines, overwritten")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of the order of rows")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of a run")
    options = parser.parse_args()
    apart: dict[str, list[float]] = {name: [] for name, changes in RUNS.items() if "fp8" in changes}
    use_all_threads()  # so that rounding is the same whatever else runs
    made = {"torch": torch.__version__, "commit": commit()}
    with tempfile.TemporaryDirectory() as folder, options.record.open("w", encoding="utf-8") as record:
        start = make_start(Path(folder))
        for seed in range(options.seeds):
            base = 0.0
            for name in RUNS:
                line = train(name, RUNS[name], seed, options.steps, start, Path(folder))
                base = line["after"] if name == BASE else base
                line["apart"] = abs(line["after"] - base) / base
                line["learned_apart"] = abs(line["in_bfloat16"] - base) / base
                line |= {"threads": torch.get_num_threads()} | made
                if name in apart:
                    apart[name].append(line["apart"])
                record.write(json.dumps(line) + "\n")
                record.flush()
                say(
                    f"{name}, seed {seed}: {line['before']:.4f} to {line['after']:.4f}, {line['apart']:.2%} apart; "
                    f"in bfloat16 {line['in_bfloat16']:.4f}, {line['learned_apart']:.2%}"
                )
        return write_means(record, apart, made)


if __name__ == "__main__":
    sys.exit(main())
