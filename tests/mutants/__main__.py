"""Plant mistakes one at a time: is each noticed by a test?

    make test-mutants
    python -m tests.mutants --record benchmarks/records/mutants.jsonl
    python -m tests.mutants --missing --record benchmarks/records/mutants.jsonl
    python -m tests.mutants --only "balancing bias" --unchecked

Each is planted in a copy of the tree, where the tests that ought to notice it are run. A row of the record is one
mutant: whether it was caught, by which test, in how many seconds, at which commit; a hang counts as caught. A run
replaces the rows of the mutants it plants and keeps the others, except those of edits that the catalog no longer has.
The last line sums up. The command ends with 1 where fewer than 95 % of what it planted were caught.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from archon.tools.bench.origin import origin
from tests.mutants.catalog import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.planting import end_at_once, examine, tracked_files
from tests.mutants.record import Record, Row, row_of, summary_of

ENOUGH = 0.95
"""The part of the mistakes that the tests must notice."""


def parsed() -> argparse.Namespace:
    """Return the options. Ends the process where they contradict each other."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="those whose name or file holds this; repeatable"
    )
    parser.add_argument("--missing", action="store_true", help="those of which the record holds no row of this edit")
    parser.add_argument("--record", type=Path, help="JSON lines; rows of other mutants are kept")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for the tests of a mutant: 600")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time: 2")
    parser.add_argument("--unchecked", action="store_true", help="do not run the tests without a mistake first")
    options = parser.parse_args()
    if options.missing and options.record is None:
        parser.error("--missing needs --record FILE, which says what is there")
    if options.only and not chosen_by(MUTANTS, options.only):
        parser.error(f"no mutant's name or file holds {' or '.join(options.only)}")
    return options


def chosen_by(mutants: Sequence[Mutant], only: Sequence[str] | None) -> list[Mutant]:
    """Return the mutants whose file or name holds one of the texts; all of them without any."""
    return [m for m in mutants if not only or any(part in f"{m.file} {m.name}" for part in only)]


def check_unplanted(chosen: Sequence[Mutant], files: Sequence[str], timeout: float) -> None:
    """Run all their tests once without any mistake. Ends the process unless they pass."""
    tests = sorted({test for mutant in chosen for test in mutant.tests})
    clean = examine(None, tests, files, timeout + 60.0 * len(chosen))
    if clean.caught or clean.error:
        sys.exit(f"the tests fail without any mistake: {clean.failed or clean.error or 'they take too long'}")
    say(f"without a mistake all tests pass ({clean.seconds:.0f} s)")


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    """The command."""
    options = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    made = origin(f"python -m tests.mutants {shlex.join(sys.argv[1:])}".strip())
    last_run = made | {"machine": made["machine"].model_dump()}
    record = Record(options.record, MUTANTS, last_run) if options.record else None
    chosen = chosen_by(MUTANTS if record is None or not options.missing else record.missing(), options.only)
    if not chosen:
        say("every mutant has its row")
        return
    started, files, rows = time.monotonic(), tracked_files(), list[Row]()
    if not options.unchecked:
        check_unplanted(chosen, files, options.timeout)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(options.jobs))
        stack.callback(end_at_once, pool)
        outcomes = pool.map(lambda mutant: examine(mutant, mutant.tests, files, options.timeout), chosen)
        for mutant, outcome in zip(chosen, outcomes, strict=True):
            rows.append(row_of(mutant, outcome, made["commit"]))
            if record is not None:
                record.put(rows[-1])
            said = f"caught by {rows[-1]['by']}" if outcome.caught else f"NOT CAUGHT {outcome.error or ''}"
            say(f"{len(rows)}/{len(chosen)} {mutant.name}: {said} ({outcome.seconds:.0f} s)")
    found = summary_of(rows)
    say(f"{found['caught']} of {found['mutants']} caught in {(time.monotonic() - started) / 60:.0f} minutes")
    sys.exit(0 if found["share"] >= ENOUGH else 1)


if __name__ == "__main__":
    main()
