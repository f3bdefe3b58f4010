"""Run every benchmark and write the README from the records.

python -m benchmarks              # about two hours on 2 cores
python -m benchmarks --quick      # small sizes, no records: does everything still run?
python -m benchmarks --only load generate
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from benchmarks import readme
from benchmarks.harness import ROOT, say

ORDER = ("train_step", "lora", "generate", "head_memory", "load", "speed", "trees", "time_to_reward", "growth", "busy")


def main() -> int:
    """Run each benchmark in its own process, continue after failures, and return 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes; writes nothing")
    parser.add_argument("--only", nargs="+", choices=ORDER, default=ORDER, help="these only")
    arguments = parser.parse_args()
    failed = []
    for name in arguments.only:
        start = time.perf_counter()
        command = [sys.executable, "-m", f"benchmarks.{name}", *(["--quick"] if arguments.quick else [])]
        code = subprocess.run(command, cwd=ROOT).returncode
        say(f"{name}: {'done' if code == 0 else f'FAILED with exit code {code}'}, {time.perf_counter() - start:.0f} s")
        if code:
            failed.append(name)
    if not arguments.quick:
        sys.argv[1:] = []
        readme.main()
    say(f"failed: {', '.join(failed)}" if failed else "all done")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
