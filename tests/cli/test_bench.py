"""Bad input to `archon bench`: one line and exit code 2, before anything is started."""

from __future__ import annotations

import json

import pytest
import yaml

from archon.cli.bench import sweep_config
from archon.schema.config import EngineConfig
from archon.tools.bench import SweepConfig, read_record
from tests.tools.bench.made import record, row


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no model to measure"),
        (("MODEL", "d1"), "no document lengths"),
        (("MODEL", "d1", "--seq", "1000"), "--tokens 8192 is not a multiple of --seq 1000"),
        (("MODEL", "d2x", "--seq", "64"), "layout"),
        (("MODEL", "--seq", "sixty"), "seq.0: got 'sixty'"),
        (("MODEL", "--seq", "64", "--recompute", "ful"), "did you mean 'full'?"),
        (("MODEL", "--seq", "64", "--recompute", "selective 0"), "a number of layers >= 1, got 0"),
        (("--config", "none.yaml"), "none.yaml"),
        (("MODEL", "--seq", "64", "--dtype", "float16"), "dtype.0: got 'float16'"),
        (("MODEL", "--seq", "64", "--compile", "perhaps"), "compile.0: got 'perhaps'"),
        (("MODEL", "--seq", "64", "--micro-batch", "32"), "do not fit micro-batches of 32"),
        (("MODEL", "--seq", "64", "--warmup", "1"), "warmup: got 1"),
        (("MODEL", "--seq", "64", "--set", "layout=d2"), "engine.layout is set by the sweep"),
        (("MODEL", "--seq", "64", "--set", "layout"), "override 'layout' is not key=value"),
        (("MODEL", "--seq", "64", "--record", "nowhere/a.json"), "nowhere is not a folder"),
        (("MODEL", "--seq", "64", "--device", "tpu"), "device must be auto, cpu, cuda or cuda:N, got 'tpu'"),
        (("MODEL", "d1", "d2", "--seq", "64", "--set", "share_prefix=1"), "did you mean 'share_prefixes'?"),
        (("nowhere", "--seq", "64"), "nowhere"),
        (("--compare", "a.json", "b.json"), "a.json: cannot be read: No such file"),
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
    assert archon("report", tmp_path / "a.json", "--trace", tmp_path / "trace.json").code == 0
    assert {event["pid"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]} == {0, 1}
    assert "requires an archon bench record" in archon("report", tmp_path, "--trace", tmp_path / "trace.json").complaint
    assert "requires a run directory" in archon("report", tmp_path / "a.json", "--serve", "0").complaint


PLANNED = ("--gpus", 2, "--tokens", 1024, "--seq", 32)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_checkpoint": {"mode": "selective", "selective": 2}, "gradient_reduction": "per_microbatch"},
        {"activation_checkpoint": {"mode": "memory_budget", "memory_budget": 0.25}, "compile": True},
        {"layout": "p2", "pipeline": {"schedule": "interleaved_1f1b"}, "optimizer": {"lr": 1e-3}},
    ],
    ids=["as planned", "selective", "memory budget", "pipeline"],
)
def test_what_is_measured_of_a_plan_is_what_it_runs(archon, checkpoint, tmp_path, changes):
    file = tmp_path / "run.yaml"
    assert archon("plan", checkpoint, *PLANNED, "--output", file).code == 0
    run = yaml.safe_load(file.read_text())
    run["model"] |= changes
    file.write_text(yaml.safe_dump(run))

    config = SweepConfig.parse(sweep_config(file, "cpu"))

    (point,) = config.points()
    assert (point.layout, point.shape.lengths) == (run["model"]["layout"], [32] * 32)
    measured, asked = config.engine_config(point), EngineConfig.parse(run["model"])
    for field in ("path", "dtype", "max_tokens_per_mb", "activation_checkpoint", "gradient_reduction", "pipeline"):
        assert getattr(measured, field) == getattr(asked, field), field
    assert measured.compile is changes.get("compile", False), "auto compiles nothing on a CPU"


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_a_plan_is_measured_and_options_beside_it_win(archon, checkpoint, tmp_path):
    file, written = tmp_path / "run.yaml", tmp_path / "record.json"
    assert archon("plan", checkpoint, *PLANNED, "--output", file).code == 0
    options = ("--recompute", "none,selective 2", "--dtype", "float32", "--device", "cpu", "--steps", 1)
    done = archon("bench", "--config", file, *options, "--record", written)
    assert done.code == 0, done.err
    layout = yaml.safe_load(file.read_text())["model"]["layout"]
    points = [row.point for row in read_record(written).rows]
    assert [(point.layout, point.recompute, point.dtype) for point in points] == [
        (layout, policy, "float32") for policy in ("none", "selective 2")
    ]
