"""The records under benchmarks/records, and the tables made from them."""

from __future__ import annotations

import statistics

import pytest

from archon.schema.errors import ConfigError
from archon.tools.bench.origin import spread
from benchmarks import harness, readme
from benchmarks.figures import Figure, figures, paint_growth
from benchmarks.growth import AXES
from benchmarks.record import Record, read_records


def a_record() -> Record:
    record = harness.new_record("train_step", "even", threads=2)
    record.setup = {"model": "26M"}
    record.checks = harness.check_close("loss", 1.0, {"peer": 1.0000001}, 1e-5)
    record.sides = {
        "archon": spread([1000.0, 1100.0], "tok/s"),
        "peer": spread([900.0, 1000.0], "tok/s"),
    }
    record.ratios = {"archon / peer": harness.ratio([1000.0, 1100.0], [900.0, 1000.0], ">= 1.05")}
    record.missing = {"other": "ImportError: No module named 'other'"}
    return record


def test_every_record_is_whole():
    for record in read_records():
        assert record.path.exists(), f"{record.benchmark}.{record.case} lies in a file of another name"
        assert not record.commit.endswith("+"), f"{record.path.name}: a record belongs to a commit"
        assert record.versions["torch"] and record.versions["transformers"]
        assert record.command.startswith("python -m benchmarks.")
        # Nothing can be compared with a peer that is missing.
        assert record.checks or record.missing, (
            f"{record.path.name}: the sides were not compared before they were timed"
        )
        assert all(check.difference <= check.tolerance for check in record.checks)
        for side in record.sides.values():
            values = side.values
            assert (side.median, side.min, side.max) == (statistics.median(values), min(values), max(values))
        for ratio in record.ratios.values():
            assert ratio.aim is None or ratio.aim_met == harness.meets(ratio.value, ratio.aim)


def test_the_readmes_say_what_the_records_say():
    for path, text in readme.wanted(read_records()).items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python -m benchmarks.readme"


def test_the_figures_are_drawn_from_the_records():
    for figure in figures(read_records()):
        assert figure.is_current, f"{figure.path}: run python -m benchmarks.readme"


def test_a_figure_of_other_records_is_not_current(tmp_path):
    (ratios,) = [figure for figure in figures([a_record()], tmp_path) if figure.path.stem == "ratios"]
    assert not ratios.is_current
    ratios.draw()
    assert ratios.is_current and "train_step, even: peer" in ratios.path.read_text(encoding="utf-8")
    faster = a_record()
    faster.ratios["archon / peer"] = harness.ratio([2000.0], [900.0], ">= 1.05")
    assert not figures([faster], tmp_path)[0].is_current


def test_growth_is_drawn_for_every_axis(tmp_path):
    speeds = {
        "cpu": "EPYC (family 25, model 17)",
        "tokens_per_second": 10.0,
        "min": 9.0,
        "max": 12.0,
        "peak_bytes": 2e9,
    }
    lines = [
        {"axis": axis, "value": value, "side": side}
        | ({"missing": "why", "cpu": "EPYC (family 25, model 17)"} if side == "torchtitan" else speeds)
        for axis in AXES
        for value in AXES[axis].values
        for side in ("archon", "torchtitan")
    ]
    figure = Figure(tmp_path / "growth.svg", "growth", lines, paint_growth)
    figure.draw()
    text = figure.path.read_text(encoding="utf-8")
    assert all(f">{axis.label}</text>" in text for axis in AXES.values())
    assert ">EPYC (family 25, model 17)</text>" in text
    assert ">archon</text>" in text and ">torchtitan</text>" not in text


def test_a_record_comes_back_from_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.record.FOLDER", tmp_path)
    record = a_record()
    assert record.write() == tmp_path / "train_step.even.json"
    assert read_records() == [record]
    (tmp_path / "x.json").write_text('{"benchmark": "x", "cases": 1}')
    with pytest.raises(ConfigError, match=r"x\.json: .*did you mean 'case'"):
        read_records()


def test_the_tables_show_misses_and_missing_peers():
    record = a_record()
    record.ratios["archon / peer, memory"] = harness.ratio([2.0], [4.0], "<= 0.4")
    text = readme.readme([record])
    assert "| archon / peer | 1.11× [1.1–1.11] | ≥ 1.05 ✓ |" in text
    assert "≤ 0.4 ✗ missed" in text
    assert "Missing: other (ImportError: No module named 'other')." in text
    assert "Checked before timing: loss within 1e-07." in text


def test_the_headlines_go_between_the_markers_and_nowhere_else():
    top = f"# archon\n{readme.BEGIN}\nold\n{readme.END}\nrest\n"
    once = readme.with_headlines(top, read_records())
    assert "old" not in once and once.count("](benchmarks/README.md#") == len(readme.HEADLINES)
    assert once.startswith("# archon\n") and once.endswith(f"{readme.END}\nrest\n")
    assert readme.with_headlines(once, read_records()) == once
    with pytest.raises(ValueError, match="no place for the headlines"):
        readme.with_headlines("# archon\n", read_records())
