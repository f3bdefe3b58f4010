"""A sweep on real ranks: what agrees is measured, what fails becomes a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from archon.engine.dry_run import dry_run
from archon.schema.errors import ConfigError
from archon.tools.bench import BenchRecord, SweepConfig, read_record, run_sweep
from archon.tools.bench.bench_record import BenchRow
from archon.tools.bench.config import Point
from archon.tools.bench.sweep import PHASE_TOLERANCE
from tests.distributed.cases import write_config

ROOT = Path(__file__).resolve().parents[3]
LOSSES = {"loss", "grad_norm", "loss_after_one_step"}
# A minute on two idle cores, of which most goes into starting processes.
pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.slow, pytest.mark.timeout(1200)]

# Read by every Python that has its folder on the path: rank 1 of a point meets with what FAULT says.
FAULT = """
import os, signal, time
if os.environ.get("RANK") == "1":
    import torch
    from archon.engine.engine import ArchonEngine
    def train_batch(self, *args):
        if os.environ["FAULT"] == "memory":
            torch.empty(2**50)
        if os.environ["FAULT"] == "crash":
            os.abort()
        if os.environ["FAULT"] == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)
    ArchonEngine.train_batch = train_batch
"""


def config(folder: Path, layouts: list[str], **changes: Any) -> SweepConfig:
    model = write_config(folder / "model", "dense")
    sizes = {"tokens": 256, "seq": [64], "micro_batch": [64], "steps": 2, "threads": 1, "device": "cpu"}
    return SweepConfig.model_validate({"model": model, "layouts": layouts} | sizes | changes)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> BenchRecord:
    """t3 cannot be dealt the model's heads; the others, after it too, are measured."""
    folder = tmp_path_factory.mktemp("sweep")
    made = run_sweep(config(folder, ["d1", "t3", "d2", "p2"]), folder / "record.json")
    assert read_record(folder / "record.json") == made
    return made


def measured(swept: BenchRecord, layout: str) -> BenchRow:
    return next(row for row in swept.rows if row.point.layout == layout)


def test_every_layout_computes_the_loss_of_the_first_before_it_is_timed(swept: BenchRecord) -> None:
    assert [row.status for row in swept.rows] == ["ok", "refused", "ok", "ok"], [row.reason for row in swept.rows]
    assert measured(swept, "d1").checks == []
    for layout in ("d2", "p2"):
        checks = measured(swept, layout).checks
        assert {(check.what, check.peer) for check in checks} == {(what, "d1") for what in LOSSES}
    assert "LayoutError" in measured(swept, "t3").reason


def test_phases_add_up_to_the_step_on_every_rank(swept: BenchRecord) -> None:
    for layout, ranks in (("d1", 1), ("d2", 2), ("p2", 2)):
        row = measured(swept, layout)
        assert row.measured is not None and len(row.measured.by_rank) == ranks
        for rank in row.measured.by_rank:
            assert sum(rank.phases_s.values()) == pytest.approx(rank.profiled_s, rel=PHASE_TOLERANCE)
            assert min(rank.phases_s[name] for name in ("forward", "backward", "optimizer")) > 0
            assert rank.memory_bytes["rss_growth"] > 0 and len(rank.step_s) == 2
        assert any("head" in rank.phases_s for rank in row.measured.by_rank) and row.mfu is not None
    assert {"all_gather", "reduce_scatter", "all_reduce"} <= measured(swept, "d2").phases_s.keys()
    assert {"send", "recv"} <= measured(swept, "p2").phases_s.keys()
    bubble = measured(swept, "p2").bubble
    assert bubble is not None and all(0 <= share < 1 for share in bubble) and measured(swept, "d2").bubble is None


def test_bytes_are_those_predicted(swept: BenchRecord, tmp_path: Path) -> None:
    row = measured(swept, "d2")
    predicted = dry_run(config(tmp_path, ["d2"]).engine_config(row.point), rank=0, tokens=64, micro_batches=2)
    assert row.measured is not None
    found = {(of.kind, of.group, of.size): (of.count, of.bytes) for of in row.measured.traffic}
    assert found == {(of.kind, of.group, of.size): (s.count, s.bytes) for of, s in predicted.step.items()}


@pytest.mark.parametrize(
    ("fault", "seconds", "status", "reason"),
    [
        ("memory", 600.0, "out of memory", "can't allocate memory"),
        ("crash", 600.0, "failed", "rank 1 was ended by signal 6"),
        ("hang", 60.0, "hung", "still running after 60 s: rank"),
        pytest.param("stop", 30.0, "hung", "was stopped (SIGSTOP) for the rest of 30 s", marks=pytest.mark.slow),
    ],
)
def test_a_point_that_fails_becomes_a_row_and_the_next_is_measured(
    fault: str, seconds: float, status: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("FAULT", fault)
    failed, after = run_sweep(config(tmp_path, ["d2", "d1"], time_limit_s=seconds)).rows
    assert failed.status == status and reason in failed.reason and failed.measured is None
    # Nothing was measured before it that it could be compared with.
    assert (after.status, after.checks) == ("ok", []), after.reason


def test_a_record_without_a_folder_is_found_before_anything_is_measured(tmp_path: Path) -> None:
    def starting(point: Point) -> None:
        raise InterruptedError(point.name)

    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        run_sweep(config(tmp_path, ["d1"]), tmp_path / "nowhere" / "record.json", on_start=starting)
    old = tmp_path / "record.json"
    old.write_text("measured before", encoding="utf-8")
    with pytest.raises(InterruptedError):
        run_sweep(config(tmp_path, ["d1"]), old, on_start=starting)
    assert old.read_text(encoding="utf-8") == "measured before"


@pytest.mark.parametrize(
    ("layouts", "dtypes"),
    [(["d1"], ["float32", "bfloat16"]), (["d1", "c2"], ["float32"]), (["d1", "c2"], ["bfloat16"])],
    ids=["both dtypes", "float32", "bfloat16"],
)
def test_recomputation_and_dtypes_compute_the_same_losses(
    tmp_path: Path, layouts: list[str], dtypes: list[str]
) -> None:
    rows = run_sweep(config(tmp_path, layouts, recompute=["none", "full"], dtype=dtypes)).rows
    assert [row.status for row in rows] == ["ok"] * 4, [row.reason for row in rows]
    for row in rows:
        first = (row.point.layout, row.point.recompute) == ("d1", "none")
        assert {check.what for check in row.checks} == (set() if first else LOSSES)
        kinds = {"all_to_all"} if row.point.layout == "c2" else set()
        assert kinds <= row.phases_s.keys()


def test_a_compiled_point_computes_the_loss_of_an_eager_one(tmp_path: Path) -> None:
    eager, compiled = run_sweep(config(tmp_path, ["d1"], recompute=["selective"], compile=[False, True])).rows
    assert (eager.status, compiled.status) == ("ok", "ok"), compiled.reason
    assert {check.what for check in compiled.checks} == LOSSES
    assert compiled.point.name.endswith("compiled")


def test_experts_on_other_ranks_are_reached_by_all_to_all(tmp_path: Path) -> None:
    made = config(tmp_path, ["d1", "d2e2"]).model_copy(update={"model": write_config(tmp_path / "moe", "moe")})
    alone, spread = run_sweep(made).rows
    assert (alone.status, spread.status) == ("ok", "ok"), (alone.reason, spread.reason)
    assert {check.what for check in spread.checks} == LOSSES
    assert "all_to_all" in spread.phases_s and "all_to_all" not in alone.phases_s
    assert spread.measured is not None and alone.measured is not None
    assert "all_to_all" in {of.kind for of in spread.measured.traffic}
    assert (alone.measured.routing, spread.measured.routing) == ("natural", "natural")
