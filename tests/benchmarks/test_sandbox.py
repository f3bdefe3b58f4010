"""The record of the sandbox: nothing escaped, nothing was left, and the guide says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.sandbox import AIM, leftovers, mix, sentence
from benchmarks.sandbox_programs import PROGRAMS
from tests.test_readme import ROOT

ROWS = [json.loads(line) for line in (ROOT / "benchmarks" / "records" / "sandbox.jsonl").read_text().splitlines()]


def test_nothing_escaped_in_the_record_and_the_guide_says_so() -> None:
    assert [row["isolation"] for row in ROWS] == ["bubblewrap", "namespaces"]
    for row in ROWS:
        assert row["passed"] and row["programs"] >= 5000 and row["kinds"] == len(PROGRAMS)
        assert row["escapes"] == 0 and row["leftovers"] == [] and row["trivial_per_second"] >= AIM
    guide = (ROOT / "docs" / "tasks" / "rewards.md").read_text()
    assert sentence(ROWS) in " ".join(guide.split())


def test_every_program_runs_at_least_once() -> None:
    assert set(mix(len(PROGRAMS), 0)) == set(mix(500, 1)) == set(PROGRAMS)


def test_leftovers_are_found() -> None:
    token = f"archon-hostile-{os.urandom(6).hex()}"
    left = Path("/tmp", token)
    process = subprocess.Popen([sys.executable, "-c", "input()", token], stdin=subprocess.PIPE)
    try:
        left.touch()
        assert [line.split(":")[0] for line in leftovers(os.getpid(), token)] == [f"process {process.pid}", str(left)]
    finally:
        left.unlink()
        process.communicate()
    assert leftovers(os.getpid(), token) == []
