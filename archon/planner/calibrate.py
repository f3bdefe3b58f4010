"""The figures that no data sheet tells, measured on the machine at hand.

Every rank of a process group calls `calibrate`. No layout's step is among what it measures: products, copies,
collectives, and on a CPU a plain pass of a small model and FSDP's handling of small blocks.
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
    collectives,
    efficiency,
    fit_latency,
    host_seconds,
    largest,
    rate,
    seconds,
    shard_seconds,
)
from archon.schema.errors import ConfigError

# Rows, columns and inner size of the product; elements of the copy and of the tensor that is summed over ranks.
GEMM = {"cuda": 8192, "cpu": 1024}
COPIED = {"cuda": 2**29, "cpu": 2**24}
SUMMED = 2**27
ROUNDS = 5


def calibrate(like: str, device: torch.device, dtype: torch.dtype) -> Hardware:
    """`like` with what this machine reaches; every rank of a process group calls it.

    On a CPU, which no data sheet here describes, the peaks themselves are the measured ones, and the node has as many
    ranks as run now. Without several ranks the links stay as they are.
    """
    known = read_hardware(like)
    if device.type == "cpu":
        return _calibrate_cpu(known, dtype)
    _check_name(like, torch.cuda.get_device_name(device))
    found: dict[str, Any] = {
        "name": f"{like}-calibrated",
        "gemm_efficiency": _share("products", _gemm(device, dtype), known.flops(str(dtype).removeprefix("torch."))),
        "memory_efficiency": _share("copies", _memory(device), known.memory_bandwidth),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory,
    }
    if ControlPlane.of_run().size > 1:
        in_node = ControlPlane.of_run().size <= known.gpus_per_node
        bandwidth = known.node_bandwidth if in_node else known.network_bandwidth
        found["link_efficiency"] = _share("sums", _link(device), bandwidth)
    return Hardware.model_validate(known.model_dump() | found)


def _calibrate_cpu(known: Hardware, dtype: torch.dtype) -> Hardware:
    """What one rank reaches alone, how many ranks reach it beside one another, and what collectives take.

    Whatever all ranks measure together is divided by their crowding, by which the time model multiplies.
    """
    device, world = torch.device("cpu"), ControlPlane.of_run()
    gemm, processors = _products(dtype, world)
    narrow = dtype == torch.bfloat16
    other = _alone(lambda: _gemm(device, torch.float32 if narrow else torch.bfloat16), world)
    memory = _alone(lambda: _memory(device), world)
    layer, micro_batch = _alone(host_seconds, world)
    found: dict[str, Any] = {
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
    crowding = max(1.0, world.size / processors)
    if world.size > 1:
        by_size = collectives(world.size)
        bandwidth = rate(by_size) * crowding
        latency, more = (s / crowding for s in fit_latency({size: of.between for size, of in by_size.items()}))
        found |= {
            "node_bandwidth": bandwidth,
            "network_bandwidth": bandwidth,
            "link_efficiency": 1.0,
            "node_latency_s": latency,
            "node_latency_per_rank_s": more,
            "network_latency_s": latency,
            "shard_overhead_s": max(0.0, shard_seconds(world.size) - by_size[world.size].hot) / crowding,
        }
    draft = Hardware.model_validate(known.model_dump() | found)
    share = _alone(lambda: efficiency(draft, dtype), world)
    return draft.model_copy(update={"gemm_efficiency": share})


def _check_name(like: str, device_name: str) -> None:
    """ConfigError where the GPU at hand is another of the known ones than the one it is taken for."""
    here = next((name for name in known_hardware() if name.split("-")[0].upper() in device_name), like)
    if like in known_hardware() and here.split("-")[0] != like.split("-")[0]:
        raise ConfigError(f"this GPU is {device_name}, not {like}: give --gpu {here}")


def _share(what: str, reached: float, peak: float) -> float:
    if reached > 1.05 * peak:
        raise ConfigError(
            f"{what} reach {reached:.3g} a second, more than the {peak:.3g} of this hardware; name the GPU at hand "
            "with --gpu"
        )
    return min(reached / peak, 1.0)


def _products(dtype: torch.dtype, world: ControlPlane) -> tuple[float, float]:
    """FLOP/s of a rank alone, and how many such ranks all of them together are worth.

    Alone and together in turn, since other programs may come and go. One process knows only the cores it may use.
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
    worth = median(sum_ / one for sum_, one in zip(together, alone, strict=True))
    return median(alone), min(max(worth, 1.0), world.size)


def _alone(measure: Callable[[], Any], world: ControlPlane) -> Any:
    """What rank 0 measures while the others wait."""
    world.barrier()
    return world.broadcast_json(measure)


def _gemm(device: torch.device, dtype: torch.dtype, rounds: int = ROUNDS) -> float:
    """FLOP/s of a large product, by the kernel of the models."""
    n = GEMM[device.type]
    left, right = (torch.randn(n, n, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    repeats = 10 if device.type == "cuda" else 1

    def work() -> None:
        for _ in range(repeats):
            product(left, right)

    return repeats * 2 * n**3 / seconds(work, device, rounds)


def _memory(device: torch.device) -> float:
    """Bytes/s read and written by a copy."""
    source = torch.zeros(COPIED[device.type], device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / seconds(lambda: target.copy_(source), device, ROUNDS)


def _link(device: torch.device) -> float:
    """Bytes/s that a rank sends in an all-reduce: 2 (n - 1) / n of the tensor (nccl-tests' bus bandwidth)."""
    n, tensor = ControlPlane.of_run().size, torch.zeros(SUMMED, device=device)
    own = 2 * (n - 1) / n * tensor.numel() * 4 / seconds(lambda: dist.all_reduce(tensor), device, ROUNDS)
    return -largest(-own)
