"""The records of a run survive a kill and a resume."""

from __future__ import annotations

import json
import math
import os
import resource
from contextlib import closing

import numpy as np
import pytest
import torch

from archon.schema.errors import ConfigError, DatasetError
from archon.training.metrics import MetricsWriter, TrajectoryWriter, read_jsonl


def test_each_step_is_on_disk_as_soon_as_it_is_written(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in (1, 2):
        writer.write(step, {"loss": 1.5 / step})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == step
        record = json.loads(lines[-1])
        assert record["step"] == step and record["loss"] == 1.5 / step and record["time"] > 1.7e9


def test_numbers_of_torch_and_numpy_and_what_json_lacks(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(
        1, {"a": torch.tensor(2.5), "b": np.int64(3), "c": math.nan, "d": -math.inf, "e": torch.arange(3), "f": None}
    )
    [record] = read_jsonl(tmp_path / "metrics.jsonl")
    assert {name: record[name] for name in "abcdef"} == {
        "a": 2.5,
        "b": 3,
        "c": "NaN",
        "d": "-Infinity",
        "e": [0, 1, 2],
        "f": None,
    }
    assert math.isnan(float(record["c"])), "a failure stays visible as one, never as a zero"


def test_a_torn_last_line_is_tolerated_and_removed_when_the_run_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_jsonl(path) == [{"step": 1}]
    MetricsWriter(path).write(2, {"loss": 1.0})
    assert [record["step"] for record in read_jsonl(path)] == [1, 2]


def test_records_are_appended_to_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ConfigError, match="it is a named pipe, not a regular file"):
        MetricsWriter(tmp_path / "metrics.jsonl")


def test_a_record_that_the_disk_does_not_take_is_an_error_that_names_the_file_and_leaves_no_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsWriter(path)) as writer:
        writer.write(1, {"loss": 1.0})
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
        try:
            with pytest.raises(OSError, match="File too large") as caught:
                writer.write(2, {"loss": 0.5})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.filename == str(path)
        writer.write(3, {"loss": 0.25})
    assert path.read_bytes().count(b"\n") == 2
    assert [record["step"] for record in read_jsonl(path)] == [1, 3]


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in range(1, 6):
        writer.write(step, {"loss": float(step)})
    assert writer.truncate(3) == 2
    writer.write(4, {"loss": 40.0})
    assert [(record["step"], record["loss"]) for record in read_jsonl(path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
        (4, 40.0),
    ]
    assert writer.truncate(9) == 0


def test_trajectories_keep_text_as_it_is(tmp_path):
    with closing(TrajectoryWriter(tmp_path / "trajectories.jsonl")) as writer:
        writer.write(7, "p3", "7√3 + «é»\n", "</script>\u2028", 0.5, length=4, stop_reason="stop")
    [record] = read_jsonl(tmp_path / "trajectories.jsonl")
    assert record["prompt"] == "7√3 + «é»\n" and record["completion"] == "</script>\u2028"
    assert (record["step"], record["group"], record["reward"], record["length"]) == (7, "p3", 0.5, 4)


def test_half_a_surrogate_pair_is_kept_as_an_escape(tmp_path):
    with closing(TrajectoryWriter(tmp_path / "trajectories.jsonl")) as writer:
        writer.write(7, "p3", "7√3 \ud800", "\udcff", 0.5)
        writer.write(8, "p3", "", "", 0.5)
        assert writer.truncate(7) == 1
    [record] = read_jsonl(tmp_path / "trajectories.jsonl")
    assert (record["prompt"], record["completion"]) == ("7√3 \ud800", "\udcff")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{oops", "not JSON"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "not JSON"),
        ('{"step": ' + "9" * 5000 + "}", "not JSON"),
        ('{"loss": 1}', "without an integer step"),
        ('{"step": "x"}', "without an integer step"),
        ('{"step": ' + "9" * 400 + "}", "without an integer step"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, what):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(DatasetError, match=f"line 2 is {what}"):
        read_jsonl(path)


def test_a_last_line_torn_inside_a_character_is_tolerated(tmp_path):
    path = tmp_path / "trajectories.jsonl"
    path.write_bytes('{"step": 1}\n{"step": 2, "prompt": "日'.encode()[:-1])
    assert read_jsonl(path) == [{"step": 1}]
    path.write_bytes(b'{"step": 1}\n\xff\n{"step": 2}\n')
    with pytest.raises(DatasetError, match="line 2 is not JSON"):
        read_jsonl(path)
