"""Compare learning with narrow AdamW moments and with float32 ones: SFT of the arithmetic demo's model for 200 steps.

    python -m benchmarks.moments_learning                       # every run, and the record
    python -m benchmarks.moments_learning --seeds 1 --steps 20 --record trial.jsonl
    archon bootstrap --config rl/recipes/arithmetic_bootstrap.yaml path=runs/start
    python -m benchmarks.moments_learning --start runs/start    # without making this checkpoint again
    python -m benchmarks.moments_learning --only int8           # these runs; the record keeps its other lines

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
from typing import Any, TextIO

import torch

from archon.engine.threads import use_all_threads
from archon.schema.errors import ConfigError
from archon.tools.bench.origin import commit
from benchmarks.fp8_learning import SEEDS, STEPS, make_start, train, write_means
from benchmarks.harness import ROOT, say

RECORD = ROOT / "benchmarks" / "records" / "moments_learning.jsonl"
BASE = "float32"
# Relative difference of the first loss by rounding only: another split into micro-batches differs by 6e-8.
SAME_START = 1e-6
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
    parser.add_argument("--only", choices=[name for name in RUNS if name != BASE], help="renew the lines of one run")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of the order of rows")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of a run")
    options = parser.parse_args()
    use_all_threads()  # so that rounding is the same whatever else runs
    made = {"torch": torch.__version__, "commit": commit()}
    kept = [line for line in read_lines(options.record) if line["run"] != options.only] if options.only else []
    bases = {line["seed"]: line for line in kept if line["run"] == BASE}
    if options.only and any(bases.get(seed, {}).get("steps") != options.steps for seed in range(options.seeds)):
        raise ConfigError(
            f"{options.record} has no run {BASE} of {options.steps} steps for each seed; leave --only out"
        )
    with tempfile.TemporaryDirectory() as folder:
        start = options.start or make_start(Path(folder))
        with options.record.open("w", encoding="utf-8") as record:
            write(record, kept)
            for seed in range(options.seeds):
                for name in [options.only] if options.only else RUNS:
                    line = train(name, {"dtype": "float32"} | RUNS[name], seed, options.steps, start, Path(folder))
                    del line["in_bfloat16"]
                    base = bases.setdefault(seed, line)
                    if abs(line["before"] - base["before"]) > SAME_START * base["before"]:
                        raise ConfigError(
                            f"the loss of the start is {line['before']}, and {base['before']} in {options.record}; "
                            "expected the same checkpoint; leave --only out"
                        )
                    line["apart"] = (line["after"] - base["after"]) / base["after"]
                    kept.append(line | made)
                    write(record, kept[-1:])
                    say(f"{name}, seed {seed}: {line['before']:.4f} to {line['after']:.4f}, {line['apart']:+.2%} apart")
    # Lines by seed in the order of `RUNS`, then the means.
    order, renewed = list(RUNS), [options.only] if options.only else [name for name in RUNS if name != BASE]
    runs = sorted((x for x in kept if "seed" in x), key=lambda x: (x["seed"], order.index(x["run"])))
    apart = {name: [x["apart"] for x in runs if x["run"] == name] for name in renewed}
    with options.record.open("w", encoding="utf-8") as record:
        write(record, runs + [x for x in kept if "seed" not in x])
        return write_means(record, apart, made)


def read_lines(record: Path) -> list[dict[str, Any]]:
    """Return the lines of a record."""
    return [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]


def write(record: TextIO, lines: list[dict[str, Any]]) -> None:
    """Append lines to a record, so that an interrupted run keeps them."""
    for line in lines:
        record.write(json.dumps(line) + "\n")
    record.flush()


if __name__ == "__main__":
    sys.exit(main())
