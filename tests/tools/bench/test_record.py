"""What is read from a record: figures, a comparison, a page, a trace; and why a point failed."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from archon.schema.errors import ConfigError
from archon.tools.bench import compare_records, read_record
from archon.tools.bench.bench_record import BenchRow, Losses
from archon.tools.bench.chrome_trace import write_trace
from archon.tools.bench.launch import failure_reason
from archon.tools.bench.table import describe
from archon.tools.report import write_bench_report
from tests.tools.bench.made import SEGMENTS, point, record, row

HUNG = 'Timeout (0:00:09)!\nThread 0x1 (most recent call first):\n  File "/a/watch.py", line 1 in poll\n\n'
HUNG += 'Thread 0x2 (most recent call first):\n  File "/a/{}.py", line 7 in {}\n  File "/a/b.py", line 9 in main\n'


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    made = record(row("d1", [1.0, 1.1]), BenchRow(point=point("t2"), status="hung", reason="no end"))
    made.write(tmp_path / "a.json")
    assert read_record(tmp_path / "a.json") == made
    (tmp_path / "b.json").write_text('{"rows": 1}')
    with pytest.raises(ConfigError, match=r"b.json is not a record of archon bench"):
        read_record(tmp_path / "b.json")


def test_a_record_of_a_folder_whose_name_is_no_text_is_written_and_read(tmp_path: Path) -> None:
    made = record(row("d1", [1.0]))
    made.command += " \udcff"
    made.write(tmp_path / "a.json")
    assert read_record(tmp_path / "a.json").command == made.command.replace("\udcff", "?")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("command",), "\ud800"),
        (("setup", "sweep"), 3),
        (("setup", "sweep"), {"engine": []}),
        (("rows", 0, "measured", "by_rank"), []),
        (("rows", 0, "measured", "ranks"), 0),
        (("rows", 0, "measured", "ranks"), 10**400),
        (("rows", 0, "measured", "peak_flops"), 0),
        (("rows", 0, "measured", "step_s", "median"), 0),
        (("rows", 0, "measured", "tokens_per_s", "median"), 0),
        (("rows", 0, "measured", "step_s", "max"), float("inf")),
        (("rows", 0, "measured", "by_rank", 0, "memory_bytes"), {"rss_growth": 10**400}),
        (("rows", 0, "measured", "by_rank", 0, "phases_s"), {"forward": 0.0}),
        (("rows", 0, "measured", "by_rank", 0, "schedule_us"), [1.0, 1.0, 0.0]),
    ],
)
def test_a_record_of_what_no_sweep_can_measure_is_none(tmp_path: Path, path: tuple[str | int, ...], value: Any) -> None:
    file = tmp_path / "a.json"
    record(row("d1", [1.0, 1.1])).write(file)
    part = data = json.loads(file.read_text())
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    file.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"a.json is not a record of archon bench"):
        read_record(file)
    file.write_text("9" * 5000)
    with pytest.raises(ConfigError, match=r"a.json is not a record of archon bench"):
        read_record(file)


def test_a_record_is_a_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="it is a named pipe, not a regular file"):
        read_record(tmp_path / "fifo")


def test_the_figures_of_a_row() -> None:
    found = row("p2", [0.5, 0.4, 0.8])
    assert found.mfu == pytest.approx((2e7 / 0.5 / 1e9, 1e7 / 0.5 / 1e9))
    assert sum(found.phases_s.values()) == pytest.approx(1e-4) and list(found.phases_s)[-1] == "other"
    # The schedule lasts from 1,010 to 1,110 µs; each rank worked 70 of those.
    assert found.bubble == pytest.approx([0.3, 0.3])
    text = "\n".join(describe(found))
    assert "128 a second (80 to 160)" in text and "4.00 % full, 2.00 % causal" in text and "bubble" in text


def test_a_row_says_how_the_experts_were_chosen() -> None:
    found = row("d1", [1.0])
    assert not any("routing" in line for line in describe(found)), "a dense model has none"
    assert found.measured is not None
    found.measured.routing = "natural"
    assert "  routing     natural" in describe(found)


def test_a_comparison_marks_what_is_beyond_the_spread() -> None:
    a = record(row("d1", [1.0, 1.2]), row("d2", [1.0, 1.2]), row("t2", [1.0]), row("p2", [1.0]))
    b = record(
        row("d1", [0.5, 0.6], 2**21),
        row("d2", [1.1, 1.3]),
        BenchRow(point=point("t2"), status="out of memory", reason="a rank was killed"),
        row("c2", [1.0]),
    )
    lines = compare_records(a, b)
    by_layout = {line.split()[0]: line for line in lines[2:]}
    assert "faster" in by_layout["d1"] and "2.000" in by_layout["d1"].split()
    assert "faster" not in by_layout["d2"] and "slower" not in by_layout["d2"]
    assert by_layout["t2"].endswith("A measured; B out of memory (a rank was killed)")
    assert by_layout["p2"].endswith("only in A") and by_layout["c2"].endswith("only in B")


def test_a_comparison_says_what_else_differs_and_keeps_points_measured_twice() -> None:
    a, b = record(row("d1", [1.0]), row("d1", [2.0])), record(row("d1", [1.0]), row("d1", [2.0]))
    a.setup, b.setup = ({"sweep": {"engine": {"x": x}, "threads": 2}, "model": {"hidden_size": 64 * x}} for x in (1, 2))
    lines = compare_records(a, b)
    assert lines[2:4] == [
        "the records differ in the model's hidden_size: 64 and 128",
        "the records differ in the engine's x: 1 and 2",
    ]
    assert [line.split()[0] for line in lines[4:]] == ["point", "d1", "d1"]


def test_the_page_shows_bars_timelines_and_no_markup_of_the_record(tmp_path: Path) -> None:
    failed = BenchRow(point=point("t2"), status="failed", reason="</script><img src=x>")
    record(row("d1", [1.0, 1.2]), failed).write(tmp_path / "a.json")
    (page,) = write_bench_report(tmp_path / "a.json")
    text = page.read_text()
    assert page == tmp_path / "a.html" and "<img" not in text and text.count("<script") == 2
    data = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    throughput, memory = data["bars"]
    assert [bar["name"].split()[0] for bar in throughput["bars"]] == ["d1"] and memory["bars"][0]["value"] == 1.0
    ok, bad = data["points"]
    assert [[part[0] for part in lane] for lane in ok["lanes"]] == [["forward", "recv", "backward"]] * 2
    assert ok["lanes"][1][0][1] == pytest.approx(0.02), "the second rank began 10 µs later"
    assert bad["lanes"] == [] and bad["status"] == "failed"


def test_a_trace_holds_every_rank(tmp_path: Path) -> None:
    write_trace(record(row("d1", [1.0])), tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert [event["name"] for event in events if event["ph"] == "X" and event["pid"] == 0] == [s[0] for s in SEGMENTS]


def error(rank: int, kinds: list[str], message: str, time: float) -> tuple[str, str]:
    return f"rank{rank}.error.json", json.dumps({"kinds": kinds, "message": message, "time": time})


@pytest.mark.parametrize(
    ("files", "code", "status", "reason"),
    [
        ([error(0, ["RuntimeError"], "connection closed", 2), error(1, ["OutOfMemoryError"], "CUDA out", 1)],
         1, "out of memory", "OutOfMemoryError: CUDA out"),
        ([error(0, ["RuntimeError"], "DefaultCPUAllocator: can't allocate memory", 1)],
         1, "out of memory", "RuntimeError: DefaultCPUAllocator: can't allocate memory"),
        ([error(0, ["LayoutError", "UserError"], "t = 3", 1)], 1, "refused", "LayoutError: t = 3"),
        ([error(0, ["DeviationError"], "loss is 1", 1)], 1, "deviates", "DeviationError: loss is 1"),
        ([("rank0.stack", HUNG.format("c", "wait")), ("rank1.stack", HUNG.format("d", "sleep")), ("rank2.stack", "")],
         1, "hung", "still running after 9 s: rank 0 in wait (c.py:7); rank 1 in sleep (d.py:7)"),
        ([("output.txt", "  exitcode  : -9 (pid: 3)")], 1, "out of memory", "killed by signal 9"),
        ([("output.txt", "  exitcode  : -15 (pid: 3)\n  exitcode  : -6 (pid: 4)")],
         1, "failed", "a rank was ended by signal 6"),
        ([("output.txt", "  exitcode  : 1 (pid: 3)\n  exitcode  : -9 (pid: 4)"),
          error(0, ["RuntimeError"], "connection closed", 2)], 1, "out of memory", "killed by signal 9"),
        ([("output.txt", "  rank      : 5 (local_rank: 1)\n  exitcode  : -11 (pid: 4)")],
         1, "failed", "rank 5 was ended by signal 11"),
        ([("output.txt", "  exitcode  : 3 (pid: 3)\n  exitcode  : -15 (pid: 4)")],
         1, "failed", "a rank ended with exit code 3"),
        ([("output.txt", "")], -signal.SIGTERM, "hung", "still running after 9 s; the ranks wrote no stacks"),
        ([("output.txt", "one\nlast words\n")], 3, "failed", "exit code 3: last words"),
    ],
)  # fmt: skip
def test_why_a_point_failed(tmp_path: Path, files: list[tuple[str, str]], code: int, status: str, reason: str) -> None:
    (tmp_path / "output.txt").write_text("")
    for name, content in files:
        (tmp_path / name).write_text(content)
    found = failure_reason(tmp_path, code, 9.0)
    assert found[0] == status and reason in found[1] and "\n" not in found[1]


def test_a_layout_that_computes_something_else_is_named() -> None:
    from archon.tools.bench.measure import DeviationError, compare_losses

    right = Losses(loss=2.0, grad_norm=1.0, loss_after_one_step=1.9)
    assert [check.what for check in compare_losses(right, "d1", right, "float32")] == list(Losses.model_fields)
    wrong = right.model_copy(update={"grad_norm": 1.01})
    with pytest.raises(DeviationError, match=r"grad norm is 1.01, but 1 in d1: they differ by 1.0e-02, allowed 1e-05"):
        compare_losses(wrong, "d1", right, "float32")
    with pytest.raises(DeviationError, match="loss is nan"):
        compare_losses(right.model_copy(update={"loss": float("nan")}), "d1", right, "bfloat16")
