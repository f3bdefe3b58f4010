"""The peers of a training step: each computes what archon does; one that deviates or is absent is told."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import harness, profiles, readme, train_step
from benchmarks.checkpoints import make_checkpoint
from benchmarks.harness import BenchmarkError, Sides, Worker
from benchmarks.record import Record

MODULE = "benchmarks.train_step"
COMPARED = ["loss", "grad_norm", "loss_after_one_step"]
NOT_TO_BE_MET = ">= 1000"
# No extra brings torchtitan; where it is not installed there is nothing to compare, and that it is reported is tested
# below on every machine.
INSTALLED = [peer for peer in train_step.EVEN_AIMS if peer != "torchtitan" or find_spec("torchtitan")]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made = make_checkpoint(tmp_path_factory.mktemp("tiny"), "tiny")
    options = {"threads": 1, "checkpoint": str(made), "model": "tiny", "device": "cpu", "dtype": "float32"}
    return options | {"lengths": [24] * 4, "max_tokens_per_mb": 48}


@pytest.fixture(scope="module")
def ours(options: dict[str, Any]) -> dict[str, Any]:
    return train_step.prepare("archon", options)[0]


@pytest.mark.slow
@pytest.mark.parametrize("peer", INSTALLED)
def test_a_peer_computes_what_archon_does(peer: str, options: dict[str, Any], ours: dict[str, Any]) -> None:
    worker = Worker(MODULE, peer, options)
    try:
        assert worker.facts is not None, worker.missing
        checks = train_step.compare({"archon": ours, peer: worker.facts}, "float32")
        assert [(check.what, check.peer) for check in checks] == [(what, peer) for what in COMPARED]
        assert worker.run()["loss"] < worker.facts["loss"]
    finally:
        worker.close()


@pytest.mark.slow
def test_two_ranks_compute_what_one_process_does(options: dict[str, Any], ours: dict[str, Any]) -> None:
    shared = {**options, "ranks": 2, "threads": 2}
    with Sides(MODULE, ["archon", train_step.FSDP2], shared) as sides:
        assert sides.missing == {}
        of_ranks = {f"{side} on two ranks": sides.facts(side) for side in sides.workers}
        assert len(train_step.compare({"archon": ours} | of_ranks, "float32")) == 2 * len(COMPARED)
        runs = sides.alternate(rounds=1, warmup=0)
        assert all(found["loss"] < ours["loss"] and found["seconds"] > 0 for (found,) in runs.values())
        for worker in sides.workers.values():
            assert worker.run(profile=True)["profile"]["collectives"] > 0


@pytest.mark.slow
def test_another_result_is_refused_before_anything_is_timed(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = shutil.copytree(options["checkpoint"], tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] *= 1.01
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})

    class Deviating(Worker):
        def __init__(self, module: str, side: str, given: dict[str, Any]) -> None:
            super().__init__(module, side, given if side == "archon" else {**given, "checkpoint": str(other)})

    def timed(*_: Any, **__: Any) -> None:
        raise AssertionError("it was timed")

    monkeypatch.setattr(harness, "Worker", Deviating)
    monkeypatch.setattr(Sides, "alternate", timed)
    monkeypatch.setattr("benchmarks.record.FOLDER", tmp_path / "records")
    with pytest.raises(BenchmarkError, match=r"^loss of archon and transformers differ by .*; nothing is timed$"):
        train_step.measure("even", options, {"transformers": ">= 1.05"}, rounds=1, keep=True)
    assert not (tmp_path / "records").exists()


@pytest.fixture(scope="module")
def run(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, str]:
    """A run in which a peer is not installed and archon misses its aim against the other; what the screen said."""
    folder = tmp_path_factory.mktemp("absent")
    (folder / "torchtitan.py").write_text("raise ModuleNotFoundError(\"No module named 'torchtitan'\")\n")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as screen:
        patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        aims = {"transformers": NOT_TO_BE_MET, "torchtitan": ">= 1.05"}
        record = train_step.measure("even", options, aims, rounds=1, keep=False)
    return record, screen.getvalue()


@pytest.mark.slow
def test_a_peer_that_is_not_installed_is_reported(run: tuple[Record, str]) -> None:
    record, screen = run
    assert list(record.sides) == ["archon", "transformers"]
    reason = record.missing["torchtitan"]
    assert reason.startswith("ModuleNotFoundError: No module named 'torchtitan' (to install it: pip install ")
    assert f"torchtitan: MISSING, {reason}" in screen
    assert f"Missing: torchtitan ({reason})." in readme.section(record)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("ranks")
def test_one_command_compares_every_peer_or_says_that_it_is_missing() -> None:
    command = [sys.executable, "-m", "benchmarks.peers", "--quick", "--rounds", "1", "--threads", "2"]
    done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for peer in (*train_step.EVEN_AIMS, train_step.FSDP2):
        if peer in (*INSTALLED, train_step.FSDP2):
            assert f", {peer} " in done.stdout and f"  archon / {peer}: " in done.stdout
        else:
            assert f"  {peer}: MISSING, ModuleNotFoundError" in done.stdout


@pytest.mark.slow
def test_a_missed_aim_comes_with_the_profile_of_both_sides(run: tuple[Record, str]) -> None:
    record, screen = run
    assert record.ratios["archon / transformers"].aim_met is False
    assert list(record.profiles) == ["archon", "transformers"]
    for side, profile in record.profiles.items():
        assert profile["matrix products"] > 0 and profile[profiles.OUTSIDE] > 0
        assert f"{side}, a profiled step: " in screen
    text = readme.section(record)
    assert "| time of one step | archon | transformers |" in text and "| matrix products | " in text
    assert Record.parse(record.model_dump(), source="it") == record


def test_the_time_of_a_step_is_that_of_its_parts() -> None:
    a = torch.ones(64, 64, requires_grad=True)
    seconds = profiles.operator_seconds(lambda: torch.softmax(a @ a, 0).sum().backward())
    assert set(seconds) >= {"matrix products", "softmax and loss", profiles.OUTSIDE}
    assert min(seconds.values()) >= 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mkldnn::_linear_pointwise", "matrix products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "fused attention"),
        ("aten::_fused_adamw_", "optimizer and clipping"),
        ("archon:all_gather", "collectives"),
        ("c10d::_reduce_scatter_base_", "collectives"),
        ("aten::mul", profiles.OTHER),
        ("autograd::engine::evaluate_function: MulBackward0", profiles.OUTSIDE),
        (profiles.STEP, profiles.OUTSIDE),
    ],
)
def test_what_the_profiler_names_has_a_kind(name: str, kind: str) -> None:
    assert profiles.kind_of(name) == kind
