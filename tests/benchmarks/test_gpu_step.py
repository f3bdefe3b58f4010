"""The GPU cases of a training step, as far as a machine without one can tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from archon.tools.bench.origin import spread
from archon.tools.planner.hardware import read_hardware
from benchmarks import gpu_step, harness, readme, step_check, train_step
from benchmarks.checkpoints import make_checkpoint, shape
from benchmarks.peer_models import hf_tensors
from tests.benchmarks.parameter_counts import parameters_of


def options_of(checkpoint: Path, model: str, lengths: list[int], recompute: str = "none") -> dict[str, Any]:
    options = {"threads": 1, "checkpoint": str(checkpoint), "model": model, "device": "cpu", "dtype": "bfloat16"}
    return options | {"lengths": lengths, "max_tokens_per_mb": 32768, "recompute": recompute}


@pytest.mark.parametrize("case", gpu_step.CASES)
def test_archons_step_of_every_case_is_foretold_to_fit(case: str, tmp_path: Path) -> None:
    model, documents, seq, recompute = gpu_step.CASES[case]
    (tmp_path / "config.json").write_text(json.dumps(shape(model)))
    found = gpu_step.predict_step(options_of(tmp_path, model, [seq] * documents, recompute))
    state = 16 * parameters_of(shape(model))  # masters, gradients and two moments in float32
    hw = read_hardware(gpu_step.HARDWARE)
    assert state < found.bytes < hw.memory_bytes - hw.reserve_bytes
    assert found.seconds > 6 * documents * seq * parameters_of(shape("0.6B")) / hw.flops("bfloat16")


def test_what_was_foretold_stands_in_the_row_of_what_was_measured() -> None:
    record = harness.new_record("train_step", "gpu-x", threads=1)
    runs = [{"memory": {"allocated": 40_000_000_000}}]
    record.sides = {gpu_step.EAGER: spread([1000.0, 500.0, 800.0], "tok/s", runs)}
    gpu_step.record_prediction(
        record, gpu_step.PredictedStep(2.0, 38_000_000_000), {gpu_step.EAGER: [1.6, 3.2, 2.0]}, 1600
    )
    assert record.ratios[f"{gpu_step.PLANNED} / {gpu_step.EAGER}, step time"].value == 1.0
    assert record.ratios[f"{gpu_step.PLANNED} / {gpu_step.EAGER}, memory"].value == 0.95
    assert f"| {gpu_step.PLANNED} | 800 [800–800] tok/s | allocated 38.00 GB |" in readme.section(record)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("experts"), "tiny-moe", dtype="bfloat16")


def test_a_checkpoint_of_experts_has_the_parameters_its_shape_says(experts: Path) -> None:
    assert sum(tensor.numel() for tensor in hf_tensors(str(experts)).values()) == parameters_of(shape("tiny-moe"))


def test_recomputing_sides_compute_what_the_others_do(experts: Path) -> None:
    kept, again = (options_of(experts, "tiny-moe", [48, 48], mode) for mode in ("none", "full"))
    ours = train_step.prepare(gpu_step.EAGER, kept)[0]
    for side in (gpu_step.EAGER, "transformers"):
        theirs = train_step.prepare(side, again)[0]
        harness.check_close("loss", ours["loss"], {side: theirs["loss"]}, step_check.TOLERANCE["bfloat16"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_case_of_experts_is_measured_as_a_gpu_would(experts: Path) -> None:
    record = gpu_step.measure_gpu("x", options_of(experts, "tiny-moe", [48, 48]), alone=False, rounds=1, keep=False)
    assert record.missing == {} and record.setup["routing"] == "natural"
    assert {gpu_step.EAGER, gpu_step.COMPILED, "transformers", gpu_step.PLANNED} <= record.sides.keys()
    assert f"{gpu_step.PLANNED} / {gpu_step.COMPILED}, step time" in record.ratios
    assert "Routing is natural" in readme.section(record)
