"""Run asynchronous RL for half an hour and watch from outside for growth and leftovers.

The calculator agent of `benchmarks.learning` calls the model over HTTP while the trainer updates it, with checkpoints
and evaluations. Every few seconds memory, open files, sockets, threads and child processes of the run and its children
are read from /proc. At the end the run is interrupted like by Ctrl-C.

    python -m benchmarks.soak --record benchmarks/records/soak.jsonl
    python -m benchmarks.soak --record trial.jsonl --minutes 2
    python -m benchmarks.soak --record benchmarks/records/soak_servers.jsonl --servers 2

With `--servers`, 256 episodes run concurrently on that many servers, which the run starts and stops; their resources
count too.

The policy hardly learns, so that the last step has as much work as the first. `benchmarks.watch` defines the allowed
growth. After the end no process may remain, and the temporary directory may hold only PyTorch's cache of compiled code.
The exit code is 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from archon.training.metrics import read_jsonl
from benchmarks.harness import ROOT, BenchmarkError, say
from benchmarks.watch import EVERY, Watch, descendants, verdict

CONFIG = ROOT / "benchmarks" / "learning" / "calculator.yaml"
CHANGES = (
    *("total_steps=1000000", "rollout.max_staleness=2", "checkpoint.every=25", "evaluation.every=100"),
    *("evaluation.max_prompts=50", "actor.optimizer.lr=1.0e-8", "rollout.dump_groups=2"),
)
EPISODES = 256
ON_SERVERS = (
    *("generator=null", "gconfig.n_samples=2", "rollout.prompts_per_step=64"),
    *("rollout.max_staleness=4", f"rollout.max_concurrent={EPISODES}"),
)
COMPILED = "torchinductor_"


def soak(folder: Path, seconds: float, servers: int, start: Path | None = None) -> dict[str, Any]:
    """Run, watch, interrupt, and return the outcome."""
    run_dir, temporary = folder / "run", folder / "tmp"
    temporary.mkdir()
    changes = [*CHANGES, *([f"actor.path={start}", "bootstrap=null"] if start else [])]
    if servers:
        launch = f"{{engine: archon, count: {servers}, args: [device=cpu]}}"
        changes += [*ON_SERVERS, f"rollout.launch={launch}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "archon", "rl", "--config", str(CONFIG), f"run_dir={run_dir}", *changes],
        env={"OMP_NUM_THREADS": "1"} | os.environ | {"TMPDIR": str(temporary)},
        cwd=ROOT,
    )
    while process.poll() is None and not (run_dir / "checkpoints").exists():
        time.sleep(EVERY)
    until = time.monotonic() + seconds
    with Watch(process.pid) as watch:
        while process.poll() is None and time.monotonic() < until:
            time.sleep(EVERY)
    samples = watch.samples
    children = descendants(process.pid) if process.poll() is None else []
    process.send_signal(signal.SIGINT)
    try:
        code = process.wait(120)
    except subprocess.TimeoutExpired:
        process.kill()
        raise BenchmarkError("the run did not end within two minutes of its interruption") from None
    if not samples:
        raise BenchmarkError(f"the run ended with {code} before anything was seen of it")
    left = [child for child in children if Path(f"/proc/{child}").exists()]
    steps = read_jsonl(run_dir / "metrics.jsonl")
    return {
        "seconds": seconds,
        "servers": servers,
        "episodes": EPISODES if servers else None,
        "running": statistics.median(row.get("rollout/running", 0) for row in steps),
        "samples": len(samples),
        "mib_by_minute": watch.mib_by_minute(),
        "code": code,
        "steps": steps[-1]["step"],
        "failed": sum(value for row in steps for name, value in row.items() if name.startswith("rollout/dropped/")),
        **verdict(samples),
        "processes_left": len(left),
        "temporary_files_left": sorted(path.name for path in temporary.iterdir() if not path.name.startswith(COMPILED)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True, help="JSON lines, overwritten")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--servers", type=int, default=0, help="0: the generator of the run's own process")
    parser.add_argument("--start", type=Path, help="the recipe's first checkpoint; default: one is made")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start = options.start.absolute() if options.start else None
        found = soak(Path(folder), 60 * options.minutes, options.servers, start)
    clean = found["flat"] and not found["processes_left"] and not found["temporary_files_left"]
    found["passed"] = clean and found["code"] == 128 + signal.SIGINT and not found["failed"]
    options.record.write_text(json.dumps(found) + "\n")
    say(json.dumps(found, indent=2))
    sys.exit(0 if found["passed"] else 1)


if __name__ == "__main__":
    main()
