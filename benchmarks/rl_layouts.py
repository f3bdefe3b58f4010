"""Run the arithmetic recipe in several layouts under torchrun and check that each learns to add.

    python -m benchmarks.rl_layouts --record benchmarks/records/rl_layouts.jsonl
    python -m benchmarks.rl_layouts --record trial.jsonl --aim 0 d2t2 -- total_steps=3 bootstrap=mine.yaml

A line of the record is one layout: processes, seconds, exit code, held-out reward before and after, and whether it
reached the aim. The exit code is 1 if a layout missed it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from archon.cli.config import read_values
from archon.parallel.layout import parse_layout
from archon.training.metrics import read_jsonl
from benchmarks.harness import ROOT, say

RECIPE = ROOT / "rl" / "recipes" / "arithmetic_cpu.yaml"
BOOTSTRAP = ROOT / "rl" / "recipes" / "arithmetic_bootstrap.yaml"
AIM = 0.85
"""Held-out reward of sampled answers at the end, which the recipe passes on one process."""

MOE = (
    "model_type=qwen3_moe",
    "hf_config.num_experts=4",
    "hf_config.num_experts_per_tok=2",
    "hf_config.moe_intermediate_size=192",
    "hf_config.norm_topk_prob=true",
)
LAYOUTS: dict[str, tuple[str, ...]] = {"d2t2": (), "d2p2": (), "d2c2": (), "d2e2": MOE}
"""Each with the changes to the recipe's bootstrap."""


def train(layout: str, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Run the recipe in `layout` and return its record line."""
    run_dir, processes = folder / layout, parse_layout(layout).world_size
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", "archon"]
    bootstrap = folder / f"{layout}.yaml"
    bootstrap.write_text(yaml.safe_dump(read_values(BOOTSTRAP, LAYOUTS[layout])))
    changes = [f"run_dir={run_dir}", f"actor.layout={layout}", f"bootstrap={bootstrap}", *overrides]
    started = time.monotonic()
    code = subprocess.run(
        [sys.executable, "-m", *launch, "rl", "--config", str(RECIPE), *changes],
        env={"OMP_NUM_THREADS": "1"} | os.environ,
        check=False,
    ).returncode
    found = {"layout": layout, "processes": processes, "code": code, "seconds": round(time.monotonic() - started, 1)}
    if code != 0:
        return found
    rows = read_jsonl(run_dir / "metrics.jsonl")
    rewards = [row["eval/reward"] for row in rows if "eval/reward" in row]
    return found | {"steps": rows[-1]["step"], "reward_before": rewards[0], "reward_after": rewards[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", default=list(LAYOUTS), help=f"default: {' '.join(LAYOUTS)}")
    parser.add_argument("--record", type=Path, required=True, help="JSON lines, overwritten")
    parser.add_argument("--aim", type=float, default=AIM, help="reward to reach")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, overrides = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    unknown = [layout for layout in options.layouts if layout not in LAYOUTS]
    if unknown:
        parser.error(f"no such layout here: {', '.join(unknown)}; expected some of {', '.join(LAYOUTS)}")
    missed = []
    with tempfile.TemporaryDirectory() as folder, options.record.open("w") as record:
        for layout in options.layouts:
            found = train(layout, Path(folder), overrides)
            found["reached"] = found["code"] == 0 and found["reward_after"] >= options.aim
            record.write(json.dumps(found) + "\n")
            record.flush()
            say(f"{layout}: {found}")
            missed += [] if found["reached"] else [layout]
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
