"""Bad input to `archon bench`: one line and exit code 2, before anything is started."""

from __future__ import annotations

import pytest

from tests.bench.made import record, row


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a model to measure"),
        (("MODEL", "d1"), "give document lengths"),
        (("MODEL", "d1", "--seq", "1000"), "--tokens 8192 is not a multiple of --seq 1000"),
        (("MODEL", "d2x", "--seq", "64"), "layout"),
        (("MODEL", "--seq", "sixty"), "seq.0: got 'sixty'"),
        (("MODEL", "--seq", "64", "--recompute", "ful"), "did you mean 'full'?"),
        (("MODEL", "--seq", "64", "--dtype", "float16"), "dtype.0: got 'float16'"),
        (("MODEL", "--seq", "64", "--compile", "perhaps"), "compile.0: got 'perhaps'"),
        (("MODEL", "--seq", "64", "--micro-batch", "32"), "do not fit micro-batches of 32"),
        (("MODEL", "--seq", "64", "--warmup", "1"), "warmup: got 1"),
        (("MODEL", "--seq", "64", "--set", "layout=d2"), "engine.layout is set by the sweep itself"),
        (("MODEL", "--seq", "64", "--set", "layout"), "override 'layout' is not key=value"),
        (("MODEL", "--seq", "64", "--record", "nowhere/a.json"), "nowhere is not a folder"),
        (("nowhere", "--seq", "64"), "nowhere"),
        (("--compare", "a.json", "b.json"), "a.json: No such file"),
        (("--compare", "MODEL/config.json", "b.json"), "config.json is not a record of archon bench"),
    ],
)
def test_what_cannot_be_measured_is_one_line(archon, checkpoint, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    given = [str(argument).replace("MODEL", str(checkpoint)) for argument in arguments]
    assert message in archon("bench", *given).complaint


def test_two_records_are_compared_and_one_is_drawn(archon, tmp_path):
    record(row("d1", [1.0, 1.2])).write(tmp_path / "a.json")
    record(row("d1", [0.5, 0.6])).write(tmp_path / "b.json")
    done = archon("bench", "--compare", tmp_path / "a.json", tmp_path / "b.json")
    assert done.code == 0 and "faster" in done.out
    drawn = archon("report", tmp_path / "a.json")
    assert drawn.code == 0 and (tmp_path / "a.html").exists()
    assert "leave it out" in archon("report", tmp_path / "a.json", "--serve", "0").complaint
