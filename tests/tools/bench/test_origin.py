"""A record names the commit that it was measured at."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from archon.tools.bench import origin


def test_only_files_that_a_measurement_depends_on_make_a_commit_unclean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "ROOT", tmp_path)
    assert origin.commit() == "unknown"
    files = [tmp_path / name for name in ("engine.py", "README.md", "benchmarks/records/load.json")]
    files[-1].parent.mkdir(parents=True)
    for file in files:
        file.write_text("as committed", encoding="utf-8")
    author = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    for arguments in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    clean = origin.commit()
    for file in files[1:]:
        file.write_text("measured anew", encoding="utf-8")
    assert origin.commit() == clean
    assert len(clean) == 12
    files[0].write_text("changed", encoding="utf-8")
    assert origin.commit() == clean + "+"


def test_processors_of_one_name_are_told_apart() -> None:
    first = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\n"
    assert origin.processor(first + first.replace(": 0", ": 1")) == "AMD EPYC (family 25, model 17)"
    assert origin.processor("processor\t: 0\nBogoMIPS\t: 50.00\n") == "unknown"
