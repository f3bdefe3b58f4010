"""Plants mistakes in copies of the tree, one a copy, and says which test notices."""

from __future__ import annotations

import os
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from archon.tools.bench.origin import ROOT
from tests.mutants.mutant import Mutant

_running: set[subprocess.Popen[bytes]] = set()
_ending = threading.Event()


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


def end_at_once(pool: ThreadPoolExecutor) -> None:
    """Begin nothing more, and end what runs."""
    _ending.set()
    pool.shutdown(wait=False, cancel_futures=True)
    for process in list(_running):
        kill(process)
