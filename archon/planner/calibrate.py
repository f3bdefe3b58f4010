"""Measures the hardware figures that no data sheet states, on this machine.

Every rank of a process group calls `calibrate`. It measures matrix products, copies, collectives, and on a CPU a pass
of a small model and FSDP over small blocks; it runs no training step of any layout.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from archon.models.layers.matmul import product
from archon.parallel.control_plane import ControlPlane
from archon.planner.hardware import Hardware, known_hardware, read_hardware
from archon.planner.probe import (
    fit_latency,
    gather_bandwidth,
    host_seconds,
    max_over_ranks,
    median_seconds,
    product_efficiency,
    shard_seconds,
    time_collectives,
)
from archon.schema.errors import ConfigError

# Rows, columns and inner size of the product; elements of the copied tensor and of the all-reduced one.
GEMM = {"cuda": 8192, "cpu": 1024}
COPIED = {"cuda": 2**29, "cpu": 2**24}
SUMMED = 2**27
ROUNDS = 5


def calibrate(like: str, device: torch.device, dtype: torch.dtype) -> Hardware:
    """Returns the hardware `like` with the efficiencies measured on this machine. A collective.

    On a CPU the peaks are measured too, and a node has as many ranks as run now. With a single rank the figures of
    links are those of `like`.
    """
    known = read_hardware(like)
    if device.type == "cpu":
        return _calibrate_cpu(known, dtype)
    _check_name(like, torch.cuda.get_device_name(device))
    peak = known.flops(str(dtype).removeprefix("torch."))
    measured: dict[str, Any] = {
        "name": f"{like}-calibrated",
        "gemm_efficiency": _efficiency("products", _gemm(device, dtype), peak),
        "memory_efficiency": _efficiency("copies", _memory(device), known.memory_bandwidth),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory,
    }
    if ControlPlane.of_run().size > 1:
        in_node = ControlPlane.of_run().size <= known.gpus_per_node
        bandwidth = known.node_bandwidth if in_node else known.network_bandwidth
        measured["link_efficiency"] = _efficiency("all-reduces", _link(device), bandwidth)
    return Hardware.model_validate(known.model_dump() | measured)


def _calibrate_cpu(known: Hardware, dtype: torch.dtype) -> Hardware:
    """Returns the speed of one rank alone, how many ranks reach it at the same time, and the cost of collectives.

    Times measured on all ranks at once are divided by their oversubscription, by which the time model multiplies.
    """
    device, world = torch.device("cpu"), ControlPlane.of_run()
    gemm, processors = _products(dtype, world)
    narrow = dtype == torch.bfloat16
    other = _alone(lambda: _gemm(device, torch.float32 if narrow else torch.bfloat16), world)
    memory = _alone(lambda: _memory(device), world)
    layer, micro_batch = _alone(host_seconds, world)
    measured: dict[str, Any] = {
        "name": "cpu",
        "bf16_flops": gemm if narrow else other,
        "fp32_flops": other if narrow else gemm,
        "gemm_efficiency": 1.0,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world.size,
        "reserve_bytes": 2**29,
        "memory_bandwidth": memory,
        "memory_efficiency": 1.0,
        "gpus_per_node": world.size,
        "processors": processors,
        "overlap": 0.0,
        "layer_overhead_s": layer,
        "micro_batch_overhead_s": micro_batch,
    }
    shared_by = max(1.0, world.size / processors)
    if world.size > 1:
        by_size = time_collectives(world.size)
        bandwidth = gather_bandwidth(by_size) * shared_by
        fit = fit_latency({size: times.between_products for size, times in by_size.items()})
        latency, per_rank = (seconds / shared_by for seconds in fit)
        measured |= {
            "node_bandwidth": bandwidth,
            "network_bandwidth": bandwidth,
            "link_efficiency": 1.0,
            "node_latency_s": latency,
            "node_latency_per_rank_s": per_rank,
            "network_latency_s": latency,
            "shard_overhead_s": max(0.0, shard_seconds(world.size) - by_size[world.size].back_to_back) / shared_by,
        }
    draft = Hardware.model_validate(known.model_dump() | measured)
    efficiency = _alone(lambda: product_efficiency(draft, dtype), world)
    return draft.model_copy(update={"gemm_efficiency": efficiency})


def _check_name(like: str, device_name: str) -> None:
    """Raise ConfigError if this GPU is known hardware other than `like`."""
    here = next((name for name in known_hardware() if name.split("-")[0].upper() in device_name), like)
    if like in known_hardware() and here.split("-")[0] != like.split("-")[0]:
        raise ConfigError(f"this GPU is {device_name}, not {like}: give --gpu {here}")


def _efficiency(what: str, reached: float, peak: float) -> float:
    if reached > 1.05 * peak:
        raise ConfigError(
            f"{what} reach {reached:.3g} per second, more than the peak of {peak:.3g} of this hardware; name the "
            "machine's GPU with --gpu"
        )
    return min(reached / peak, 1.0)


def _products(dtype: torch.dtype, world: ControlPlane) -> tuple[float, float]:
    """Returns FLOP/s of a rank alone, and the total FLOP/s of all ranks as a multiple of it.

    Measures alone and together in turn, because the load of other programs may change. A single process computes the
    multiple from the cores it may use.
    """
    device = torch.device("cpu")
    if world.size == 1:
        cores = len(os.sched_getaffinity(0)) / torch.get_num_threads()
        return _gemm(device, dtype), max(1.0, cores)
    alone, together = [], []
    for _ in range(ROUNDS):
        alone.append(_alone(lambda: _gemm(device, dtype, 1), world))
        world.barrier()
        own = torch.tensor(_gemm(device, dtype, 1), dtype=torch.float64)
        dist.all_reduce(own)
        together.append(float(own))
    processors = median(total / one for total, one in zip(together, alone, strict=True))
    return median(alone), min(max(processors, 1.0), world.size)


def _alone(measure: Callable[[], Any], world: ControlPlane) -> Any:
    """Returns on every rank the result of rank 0, which measures while the others wait."""
    world.barrier()
    return world.broadcast_json(measure)


def _gemm(device: torch.device, dtype: torch.dtype, rounds: int = ROUNDS) -> float:
    """Returns FLOP/s of a large matrix product, by the kernel that the models use."""
    n = GEMM[device.type]
    left, right = (torch.randn(n, n, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    repeats = 10 if device.type == "cuda" else 1

    def work() -> None:
        for _ in range(repeats):
            product(left, right)

    return repeats * 2 * n**3 / median_seconds(work, device, rounds)


def _memory(device: torch.device) -> float:
    """Returns bytes/s read and written by a copy."""
    source = torch.zeros(COPIED[device.type], device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / median_seconds(lambda: target.copy_(source), device, ROUNDS)


def _link(device: torch.device) -> float:
    """Returns bytes/s that a rank sends in an all-reduce: 2 (n - 1) / n of the tensor (nccl-tests' bus bandwidth)."""
    n, tensor = ControlPlane.of_run().size, torch.zeros(SUMMED, device=device)
    own = 2 * (n - 1) / n * tensor.numel() * 4 / median_seconds(lambda: dist.all_reduce(tensor), device, ROUNDS)
    return -max_over_ranks(-own)
