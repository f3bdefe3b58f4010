"""Records what the ranks of each case of the gradient matrix find, and writes the tables of parallel/README.md.

make test-matrix                             # every case anew
python -m tests.distributed.record --missing # cases that are not in the record, or have changed since
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from archon.parallel.layout import parse_layout
from archon.tools.bench.origin import commit
from archon.tools.check.rank_pool import Pool, RankError
from tests.distributed.cases import Case
from tests.distributed.matrix import reference_key, run_reference
from tests.distributed.matrix_cases import CASES
from tests.distributed.table import RECORD, read_record, write_page
from tests.distributed.verdict import Verdict, examine


class Runner:
    """Runs cases one after the other; a model's reference is made once, and a pool of ranks serves all of its size."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pool = Pool(1)
        self.references: dict[tuple[object, ...], Path] = {}

    def ranks(self, size: int) -> Pool:
        """The pool of as many ranks; the one of another size is closed."""
        if self.pool.size != size:
            self.pool.close()
            self.pool = Pool(size)
        return self.pool

    def reference(self, case: Case) -> Path:
        """The folder of what one process finds for the case."""
        key = reference_key(case)
        if key not in self.references:
            folder = self.folder / str(len(self.references))
            run_reference(case, folder)
            self.references[key] = folder
        return self.references[key]


def is_current(case: Case, record: dict[str, dict[str, Any]]) -> bool:
    """Whether the record holds the case as it is now: its model, options and layout."""
    return record.get(case.name, {}).get("definition") == case.definition


def line_of(case: Case, verdict: Verdict) -> dict[str, Any]:
    """The case's line in the record."""
    return {
        "case": case.name,
        "layout": case.layout,
        "model": case.model + (" critic" if case.critic else ""),
        "dtype": case.dtype,
        "options": case.config,
        "traps": list(case.traps),
        "gradient": verdict.worst("grad."),
        "norm": verdict.worst("norm"),
        "loss": verdict.worst("loss"),
        "weights": verdict.worst("weight.") if case.dtype == "float64" else None,
        "seconds": round(verdict.seconds, 2),
        "torch": torch.__version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "definition": case.definition,
    }


def write_record(record: dict[str, dict[str, Any]], path: Path = RECORD) -> None:
    """Write the lines of the cases there are, in their order."""
    lines = (record[case.name] for case in CASES if case.name in record)
    written = path.with_suffix(".new")
    written.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    os.replace(written, path)


def run(cases: list[Case], record: dict[str, dict[str, Any]]) -> list[str]:
    """Record each case as soon as it has run. Returns a line for each that a layout computes otherwise."""
    failures = []
    with tempfile.TemporaryDirectory(prefix="archon-matrix-") as folder:
        runner = Runner(Path(folder))
        for case in sorted(cases, key=lambda case: parse_layout(case.layout).world_size):
            try:
                verdict = examine(case, runner.ranks, runner.reference)
            except (AssertionError, RankError) as error:
                failures.append(f"{case.name}: {error}")
                continue
            if verdict.beyond:
                failures.append(f"{case.name}: beyond the tolerance: {verdict.beyond}")
                continue
            record[case.name] = line_of(case, verdict)
            write_record(record)
        runner.pool.close()
    return failures


def main() -> int:
    """Return 1 where a case fails; its former line is then removed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--missing", action="store_true", help="keep the lines of cases that have not changed")
    missing = parser.parse_args().missing
    kept = read_record() if missing else {}
    record = {case.name: kept[case.name] for case in CASES if is_current(case, kept)}
    failures = run([case for case in CASES if case.name not in record], record)
    write_record(record)
    write_page()
    print("\n".join(failures) or f"{len(record)} cases in the record")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
