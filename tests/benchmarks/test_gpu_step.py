"""The GPU cases of a training step, as far as a machine without one can tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from archon.tools.bench.origin import spread
from archon.tools.planner.hardware import read_hardware
from benchmarks import gpu_step, harness, profiles, readme, step_check, train_step
from benchmarks.checkpoints import make_checkpoint, shape
from benchmarks.gpu_step import ARCHON, CASES, Aim
from benchmarks.peer_models import hf_tensors
from benchmarks.profiles import IDLE, Kernel
from tests.benchmarks.parameter_counts import parameters_of


@pytest.mark.parametrize("name", CASES)
def test_archons_step_of_every_case_is_predicted_to_fit_one_h100(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    (tmp_path / "config.json").write_text(json.dumps(shape(case.model)))
    hardware = read_hardware("h100-80gb")
    for side in case.sides:
        options = gpu_step.planned_options(case, tmp_path)
        step = gpu_step.predict_step(options, side)
        # Masters, gradients and two moments in float32; with a LoRA, frozen weights in bfloat16.
        state = (2 if case.lora else 16) * parameters_of(shape(case.model))
        assert state < step.bytes < hardware.memory_bytes - hardware.reserve_bytes, side
        tokens = case.documents * case.seq
        work = (4 if case.lora else 6) * tokens * gpu_step.case_work(options).active
        assert step.seconds > work / (hardware.fp8_flops if "fp8" in case.sides[side] else hardware.bf16_flops), side


@pytest.mark.parametrize(
    ("gpu", "file"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("", "h100-80gb"),
    ],
)
def test_the_planner_knows_the_gpu_by_its_name(gpu: str, file: str) -> None:
    assert gpu_step.hardware_name(gpu) == file


def test_the_prediction_stands_next_to_the_measurement() -> None:
    record = harness.new_record("gpu", "x", threads=1)
    runs = [{"memory": {"allocated": 40_000_000_000}}]
    record.sides = {ARCHON: spread([1000.0, 500.0, 800.0], "tok/s", runs)}
    step = gpu_step.PredictedStep(2.0, 38_000_000_000)
    gpu_step.record_prediction(record, ARCHON, step, [1.6, 3.2, 2.0], 1600)
    planned = f"{gpu_step.PLANNED} / {ARCHON}"
    assert record.ratios[f"{planned}, step time"].value == 1.0 and record.ratios[f"{planned}, step time"].aim_met
    assert record.ratios[f"{planned}, memory"].value == 0.95
    assert f"| {gpu_step.PLANNED}, {ARCHON} | 800 [800–800] tok/s | allocated 38.00 GB |" in readme.section(record)
    gpu_step.record_prediction(record, ARCHON, gpu_step.PredictedStep(1.6, 1), [2.0], 1600)
    assert record.ratios[f"{planned}, step time"].aim_met is False, "more than 15 % too fast"


@pytest.mark.parametrize(
    ("aim", "ratio", "met"),
    [
        (Aim("tok/s", 90), "archon / 90 tok/s", True),
        (Aim("full MFU", 35), "archon, full MFU / 35 %", False),
        (Aim("other", 2.5), "archon / other", False),
        (Aim(ARCHON, 0.4, "other"), "other / archon", True),
    ],
)
def test_an_aim_is_a_ratio_that_is_met_or_missed(aim: Aim, ratio: str, met: bool) -> None:
    record = harness.new_record("gpu", "x", threads=1)
    record.sides["archon, full MFU"] = spread([30.0], "%")
    gpu_step.record_aim(record, aim, {ARCHON: [100.0], "other": [50.0]})
    assert {name: value.aim_met for name, value in record.ratios.items()} == {ratio: met}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("experts"), "tiny-moe", dtype="bfloat16")


def test_a_checkpoint_of_experts_has_the_parameters_its_shape_says(experts: Path) -> None:
    assert sum(tensor.numel() for tensor in hf_tensors(str(experts)).values()) == parameters_of(shape("tiny-moe"))


def test_recomputing_sides_compute_what_the_others_do(experts: Path) -> None:
    options: dict[str, Any] = {"threads": 1, "checkpoint": str(experts), "model": "tiny-moe", "device": "cpu"}
    options |= {"dtype": "bfloat16", "lengths": [48, 48], "max_tokens_per_mb": 96, "prompt": 0, "recompute": "full"}
    options |= {"engines": {ARCHON: {}, "archon (recomputing)": gpu_step.RECOMPUTED}}
    ours = gpu_step.prepare(ARCHON, options)[0]
    for side in ("archon (recomputing)", "transformers"):
        theirs = gpu_step.prepare(side, options)[0]
        harness.check_close("loss", ours["loss"], {side: theirs["loss"]}, step_check.TOLERANCE["bfloat16"])


def test_documents_of_a_group_begin_with_one_prompt_that_has_no_loss(experts: Path) -> None:
    options = {"checkpoint": str(experts), "lengths": [8] * 6, "prompt": 5, "samples": 3}
    docs = train_step.documents(options)
    for group in (docs[:3], docs[3:]):
        assert len({tuple(doc[:5].tolist()) for doc in group}) == 1
        assert len({tuple(doc.tolist()) for doc in group}) == 3
    assert docs[0][:5].tolist() != docs[3][:5].tolist()


def test_the_time_of_a_gpu_step_is_that_of_its_kernels_and_of_the_gaps_between_them() -> None:
    kernels = [
        Kernel("nvjet_hsh_128x256", 0, 100),
        Kernel("triton_poi_fused_add_3", 150, 170),
        Kernel("Memcpy HtoD", 160, 180),  # on another stream
        Kernel("flash_bwd_sm90", 180, 280),
    ]
    seconds = profiles.seconds_by_class(reversed(kernels))
    assert seconds == pytest.approx({"GEMM": 1e-4, "Triton": 2e-5, "copies": 2e-5, "attention": 1e-4, IDLE: 5e-5})


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void flash::flash_fwd_splitkv", "attention"),
        ("sm90_xmma_gemm_bf16", "GEMM"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("void at::native::index_elementwise_kernel", "index"),
        ("void at::native::reduce_kernel", "reduce"),
        ("void at::native::vectorized_elementwise_kernel", "elementwise"),
        ("Memset (Device)", "copies"),
        ("ncclDevKernel", profiles.OTHER_KERNELS),
    ],
)
def test_kernels_have_a_class(name: str, kind: str) -> None:
    assert profiles.kernel_class(name) == kind


def test_kernels_of_this_project_have_their_own_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "own_kernels", lambda: frozenset({"reduce_tile"}))
    assert profiles.kernel_class("reduce_tile") == profiles.OWN_KERNELS
