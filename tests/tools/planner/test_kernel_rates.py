"""The rate of each kind of kernel, measured in small sizes on a CPU."""

from __future__ import annotations

import pytest
import torch

from archon.models.attention.registry import backends_on
from archon.schema.errors import ConfigError
from archon.tools.planner.calibrate import measure_kernels
from archon.tools.planner.hardware import Hardware, read_hardware
from archon.tools.planner.kernel_rates import TINY_SIZES, fit_attention_rate, measure_launch, median_seconds

CPU = torch.device("cpu")


def test_a_gpus_calibration_measures_every_kind_of_kernel() -> None:
    known = read_hardware("h100-80gb")
    rates = measure_kernels(known, CPU, torch.bfloat16, TINY_SIZES)
    kinds = {"gemm_efficiency", "grouped_gemm_efficiency", "fp8_efficiency", "attention", "head_passes", "launch_s"}
    assert rates.keys() == kinds | {"memory_efficiency"}
    calibrated = Hardware.model_validate(known.model_dump() | rates)
    assert calibrated.attention.keys() == {backend.name for backend in backends_on(CPU, torch.bfloat16)}
    assert calibrated.attention and calibrated.launch_s > 0 and calibrated.head_passes > 0


def test_hardware_without_fp8_matmuls_is_not_measured_with_them() -> None:
    rates = measure_kernels(read_hardware("a100-80gb"), CPU, torch.bfloat16, TINY_SIZES)
    assert "fp8_efficiency" not in rates


def test_a_gpu_of_lower_peak_is_refused() -> None:
    slow = read_hardware("a100-80gb").model_copy(update={"bf16_flops": 1.0})
    with pytest.raises(ConfigError, match=r"measured matmuls reach .* set --gpu to the GPU of this machine"):
        measure_kernels(slow, CPU, torch.bfloat16, TINY_SIZES)


def test_the_rate_of_attention_goes_through_both_measurements() -> None:
    """FlashAttention-2 on an H100: documents of 4,096 and of 32,768 tokens."""
    rate = fit_attention_rate((2048, 272e12), (16384, 330e12))
    assert (rate.reached(2048), rate.reached(16384)) == pytest.approx((272e12, 330e12))
    assert (rate.flops, rate.half_keys) == pytest.approx((340e12, 514), rel=0.01)  # as rounded in h100-80gb.yaml
    noise = fit_attention_rate((4, 2e9), (32, 1e9))
    assert (noise.flops, noise.half_keys) == (2e9, 0)


def test_a_launch_is_one_of_a_row() -> None:
    calls = []
    assert median_seconds(lambda: calls.append(0), CPU, rounds=3) >= 0 and len(calls) == 4
    assert 0 < measure_launch(CPU, TINY_SIZES) < 1e-2
