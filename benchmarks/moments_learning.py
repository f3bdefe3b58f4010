"""Compare learning with narrow AdamW moments and with float32 ones: SFT of the arithmetic demo's model for 200 steps.

    python -m benchmarks.moments_learning                       # every run, and the record
    python -m benchmarks.moments_learning --seeds 1 --steps 20 --record trial.jsonl
    archon bootstrap --config rl/recipes/arithmetic_bootstrap.yaml path=runs/start
    python -m benchmarks.moments_learning --start runs/start    # without making this checkpoint again

Runs start from the checkpoint on which the demo starts RL, with the demo's optimizer and schedule, in float32. A seed
is an order of rows. A line of the record is one run: the held-out loss before and after, and the relative difference of
the final loss from float32 moments (`apart`). A second float32 run with smaller micro-batches differs by rounding only
and shows the noise. The last lines give the mean of |`apart`| over the seeds; the aim is at most 1 %. The exit code is
1 if a format misses it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from archon.engine.threads import use_all_threads
from archon.tools.bench.origin import commit
from benchmarks.fp8_learning import SEEDS, STEPS, make_start, train, write_means
from benchmarks.harness import ROOT, say

RECORD = ROOT / "benchmarks" / "records" / "moments_learning.jsonl"
BASE = "float32"
RUNS: dict[str, dict[str, Any]] = {
    BASE: {},
    "float32 in smaller micro-batches": {"max_tokens_per_mb": 512},
    "bfloat16": {"optimizer": {"moments": "bfloat16"}},
    "int8": {"optimizer": {"moments": "int8"}},
}


def main() -> int:
    """Make every run. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=RECORD, help="JSON lines, overwritten")
    parser.add_argument("--start", type=Path, help="the demo's checkpoint; made first if left out")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of the order of rows")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of a run")
    options = parser.parse_args()
    use_all_threads()  # so that rounding is the same whatever else runs
    made = {"torch": torch.__version__, "commit": commit()}
    apart: dict[str, list[float]] = {name: [] for name in RUNS if name != BASE}
    with tempfile.TemporaryDirectory() as folder, options.record.open("w", encoding="utf-8") as record:
        start = options.start or make_start(Path(folder))
        for seed in range(options.seeds):
            base = 0.0
            for name, changes in RUNS.items():
                line = train(name, {"dtype": "float32"} | changes, seed, options.steps, start, Path(folder))
                del line["in_bfloat16"]
                base = line["after"] if name == BASE else base
                line["apart"] = (line["after"] - base) / base
                if name != BASE:
                    apart[name].append(line["apart"])
                record.write(json.dumps(line | made) + "\n")
                record.flush()
                say(f"{name}, seed {seed}: {line['before']:.4f} to {line['after']:.4f}, {line['apart']:+.2%} apart")
        return write_means(record, apart, made)


if __name__ == "__main__":
    sys.exit(main())
