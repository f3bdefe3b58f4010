"""Plants mistakes in copies of the tree, one a copy, and says which test notices; `tests.mutants` lists them."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from archon.bench.origin import ROOT, origin

ENOUGH = 0.95
"""The part of the mistakes that the tests must notice."""


_running: set[subprocess.Popen[bytes]] = set()
_ending = threading.Event()


@dataclass(frozen=True)
class Mutant:
    """A mistake as an edit of the source, and the tests that ought to notice it.

    Args:
        name: what is wrong, in a few words.
        file: the module, from the root of the tree.
        snippet: is in it exactly once.
        replacement: what the mistake puts in its place.
        tests: pytest's names of tests or of files of them.
    """

    name: str
    file: str
    snippet: str
    replacement: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """The module with the mistake. Raises ValueError unless `snippet` is in `text` exactly once."""
        found = text.count(self.snippet)
        if found != 1:
            raise ValueError(f"{self.name}: its snippet occurs {found} times in {self.file}, expected once")
        return text.replace(self.snippet, self.replacement)


@dataclass(frozen=True)
class Outcome:
    """What happened to the tests in one copy. `failed` is the first that failed, None where none did; `error` says why
    nothing can be concluded."""

    failed: str | None
    seconds: float
    timed_out: bool = False
    error: str | None = None

    @property
    def caught(self) -> bool:
        return self.failed is not None or self.timed_out


def tracked_files() -> list[str]:
    """What git keeps of the tree, links included, from its root."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and os.path.lexists(ROOT / name)]


def copy_tree(files: Sequence[str], target: Path) -> None:
    """A copy of these files as they are now, links as links."""
    for name in files:
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, place, follow_symlinks=False)


def run_tests(tree: Path, tests: Sequence[str], scratch: Path, timeout: float) -> Outcome:
    """Run tests in a copy of the tree, up to the first that fails; `scratch` takes their temporary files."""
    report, output = scratch / "report.xml", scratch / "output.txt"
    (scratch / "tmp").mkdir()
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "TMPDIR": str(scratch / "tmp")}
    data = ROOT.parent / "shared" / "data"
    if data.is_dir():
        environment.setdefault("ARCHON_DATA", str(data))
    options = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={scratch / 'pytest'}", f"--junitxml={report}"]
    started, timed_out = time.monotonic(), False
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=tree,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _running.add(process)
        try:
            if _ending.is_set():
                raise KeyboardInterrupt
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            kill(process)
            process.wait()
            _running.discard(process)
    seconds = round(time.monotonic() - started, 1)
    if timed_out:
        return Outcome(None, seconds, timed_out=True)
    failed = first_failure(report) if process.returncode == 1 else None
    if failed is None and process.returncode != 0:
        tail = output.read_text(errors="replace")[-2000:]
        return Outcome(None, seconds, error=f"pytest ended with {process.returncode}: {tail}")
    return Outcome(failed, seconds)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End the tests, and what they have started and left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def first_failure(report: Path) -> str | None:
    """The first test that failed, or whose fixture did, by pytest's name."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            return f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
    return None


def examine(mutant: Mutant | None, tests: Sequence[str], files: Sequence[str], timeout: float) -> Outcome:
    """Run `tests` in a fresh copy of the tree with the mistake, or without any."""
    with tempfile.TemporaryDirectory(prefix="archon-mutant-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder, "tree")
        copy_tree(files, tree)
        if mutant is not None:
            place = tree / mutant.file
            place.write_text(mutant.applied(place.read_text(encoding="utf-8")), encoding="utf-8")
        return run_tests(tree, tests, Path(folder), timeout)


def line_of(mutant: Mutant, outcome: Outcome, at: str) -> dict[str, Any]:
    """A mutant's line of the record."""
    by = f"time-out after {outcome.seconds:.0f} s" if outcome.timed_out else outcome.failed
    found = {"mutant": mutant.name, "file": mutant.file, "caught": outcome.caught, "by": by}
    return found | {"seconds": outcome.seconds, "commit": at} | ({"error": outcome.error} if outcome.error else {})


def summary_of(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many mutants were caught, and which were not."""
    caught = sum(line["caught"] for line in lines)
    survivors = [line["mutant"] for line in lines if not line["caught"]]
    return {"mutants": len(lines), "caught": caught, "share": round(caught / len(lines), 4), "survivors": survivors}


def end_at_once(pool: ThreadPoolExecutor) -> None:
    """Begin nothing more, and end what runs."""
    _ending.set()
    pool.shutdown(wait=False, cancel_futures=True)
    for process in list(_running):
        kill(process)


def say(text: str) -> None:
    print(text, flush=True)


def main(mutants: Sequence[Mutant], doc: str) -> None:
    """The command: `python -m tests.mutants`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="those whose name or file holds this; repeatable"
    )
    parser.add_argument("--record", type=Path, help="JSON lines, written anew")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for the tests of a mutant: 600")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time: 2")
    parser.add_argument("--unchecked", action="store_true", help="do not run the tests without a mistake first")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen = [m for m in mutants if not options.only or any(part in f"{m.file} {m.name}" for part in options.only)]
    if not chosen:
        parser.error(f"no mutant's name or file holds {' or '.join(options.only)}")
    started, files = time.monotonic(), tracked_files()
    made = origin(f"python -m tests.mutants {shlex.join(sys.argv[1:])}".strip())
    if not options.unchecked:
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        clean = examine(None, tests, files, options.timeout + 60.0 * len(chosen))
        if clean.caught or clean.error:
            sys.exit(f"the tests fail without any mistake: {clean.failed or clean.error or 'they take too long'}")
        say(f"without a mistake all tests pass ({clean.seconds:.0f} s)")
    lines: list[dict[str, Any]] = []
    with ExitStack() as stack:
        record = stack.enter_context(options.record.open("w", encoding="utf-8")) if options.record else None

        def write(line: dict[str, Any]) -> None:
            if record is not None:
                record.write(json.dumps(line, ensure_ascii=False) + "\n")
                record.flush()

        pool = stack.enter_context(ThreadPoolExecutor(options.jobs))
        stack.callback(end_at_once, pool)
        outcomes = pool.map(lambda mutant: examine(mutant, mutant.tests, files, options.timeout), chosen)
        for mutant, outcome in zip(chosen, outcomes, strict=True):
            lines.append(line_of(mutant, outcome, made["commit"]))
            write(lines[-1])
            said = f"caught by {lines[-1]['by']}" if outcome.caught else f"NOT CAUGHT {outcome.error or ''}"
            say(f"{len(lines)}/{len(chosen)} {mutant.name}: {said} ({outcome.seconds:.0f} s)")
        found = summary_of(lines)
        seconds = round(time.monotonic() - started, 1)
        write({"summary": found | {"seconds": seconds} | made | {"machine": made["machine"].model_dump()}})
    say(f"{found['caught']} of {found['mutants']} caught in {seconds / 60:.0f} minutes")
    sys.exit(0 if found["share"] >= ENOUGH else 1)
