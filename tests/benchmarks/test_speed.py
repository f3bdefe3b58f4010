"""Leaving out a device for speed changes nothing that is computed."""

from __future__ import annotations

import pytest

from benchmarks import harness, readme, speed


@pytest.mark.slow
@pytest.mark.parametrize("name", speed.CASES)
def test_both_sides_compute_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["speed.py", "--case", name, "--quick", "--rounds", "1", "--threads", "1"])
    records = []
    monkeypatch.setattr(harness, "finish", lambda record, keep: records.append((record, keep)))
    speed.main()
    ((record, keep),) = records
    assert not keep and len(record.sides) == 2 and record.checks
    assert f"| {name} | archon / {speed.CASES[name].other} |" in readme.lines([record])
