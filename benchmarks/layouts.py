"""Time training steps of a small Qwen3 in several layouts with `archon bench`, called from Python.

    python -m benchmarks.layouts --record benchmarks/records/layouts/26M.json
    python -m benchmarks.layouts d1 d2 t2 p2 --tokens 4096 --record layouts.json

For another model: `archon bench MODEL d1 d2 --seq 1024`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path

from archon.tools.bench import SweepConfig, run_sweep
from archon.tools.bench.table import table
from benchmarks.checkpoints import shape
from benchmarks.harness import say

LAYOUTS = ("d1", "d2", "t2", "c2", "p2")


def main() -> int:
    """Sweep and print; exit code 1 where a point failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", default=list(LAYOUTS), help=f"default: {' '.join(LAYOUTS)}")
    parser.add_argument("--model", default="26M", help="size, as in benchmarks.train_step (default 26M)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a step (default 4096)")
    parser.add_argument("--seq", type=int, default=512, help="tokens of a document (default 512)")
    parser.add_argument("--micro-batch", type=int, default=1024, help="most tokens of a micro-batch (default 1024)")
    parser.add_argument("--record", type=Path, help="JSON file")
    options = parser.parse_args()
    if options.record:
        options.record.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, options.model)
        folder.mkdir()
        Path(folder, "config.json").write_text(json.dumps(shape(options.model)), encoding="utf-8")
        wanted = SweepConfig(
            model=str(folder),
            layouts=options.layouts,
            tokens=options.tokens,
            seq=[options.seq],
            micro_batch=[options.micro_batch],
        )
        command = shlex.join(["python", "-m", "benchmarks.layouts", *sys.argv[1:]])
        made = run_sweep(
            wanted, options.record, lambda row: say(f"{row.point.name}: {row.status} {row.reason}"), command
        )
    say("\n".join(table(made)))
    return int(any(row.status != "ok" for row in made.rows))


if __name__ == "__main__":
    sys.exit(main())
