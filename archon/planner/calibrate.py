"""The three constants that no data sheet tells, measured on the machine at hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from archon.planner.hardware import Hardware, read_hardware
from archon.schema.errors import ConfigError

# Rows, columns and inner size of the product; elements of the copy and of the tensor that is summed over ranks.
GEMM = {"cuda": 8192, "cpu": 1024}
COPIED = {"cuda": 2**29, "cpu": 2**24}
SUMMED = {"cuda": 2**27, "cpu": 2**22}
ROUNDS = 5


def calibrate(like: str, device: torch.device, dtype: torch.dtype) -> Hardware:
    """`like` with what this machine reaches; every rank of a process group calls it.

    On a CPU, which no data sheet here describes, the peaks themselves are the measured ones and the shares 1. Without
    several ranks the links stay as they are.
    """
    known = read_hardware(like)
    kind = device.type
    gemm, memory, link = _gemm(device, dtype), _memory(device), _link(device)
    found: dict[str, Any] = {"name": f"{like}-calibrated"}
    if kind == "cpu":
        found |= {"name": "cpu", "bf16_flops": gemm, "fp32_flops": gemm, "memory_bandwidth": memory}
        found |= {"gemm_efficiency": 1.0, "memory_efficiency": 1.0, "gpus_per_node": 1 if link is None else _world()}
        found |= {"memory_bytes": _cpu_memory(), "reserve_bytes": 2**29}
        if link is not None:
            found |= {"node_bandwidth": link, "network_bandwidth": link, "link_efficiency": 1.0}
        return Hardware.model_validate(known.model_dump() | found)
    found |= {
        "gemm_efficiency": _share("products", gemm, known.flops(str(dtype).removeprefix("torch."))),
        "memory_efficiency": _share("copies", memory, known.memory_bandwidth),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory,
    }
    if link is not None:
        in_node = _world() <= known.gpus_per_node
        found["link_efficiency"] = _share("sums", link, known.node_bandwidth if in_node else known.network_bandwidth)
    return Hardware.model_validate(known.model_dump() | found)


def _share(what: str, reached: float, peak: float) -> float:
    if reached > 1.05 * peak:
        raise ConfigError(
            f"{what} reach {reached:.3g} a second, more than the {peak:.3g} of this hardware; name the GPU at hand "
            "with --gpu"
        )
    return min(reached / peak, 1.0)


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _cpu_memory() -> int:
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """The median of several rounds after one that is not counted."""
    times = []
    for _ in range(ROUNDS + 1):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gemm(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large product."""
    n = GEMM[device.type]
    left, right = (torch.randn(n, n, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    repeats = 10 if device.type == "cuda" else 1

    def work() -> None:
        for _ in range(repeats):
            torch.matmul(left, right)

    return repeats * 2 * n**3 / _seconds(work, device)


def _memory(device: torch.device) -> float:
    """Bytes/s read and written by a copy."""
    source = torch.zeros(COPIED[device.type], device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / _seconds(lambda: target.copy_(source), device)


def _link(device: torch.device) -> float | None:
    """Bytes/s that a rank sends in an all-reduce: 2 (n - 1) / n of the tensor (nccl-tests' bus bandwidth)."""
    n = _world()
    if n == 1:
        return None
    tensor = torch.zeros(SUMMED[device.type], device=device)
    own = 2 * (n - 1) / n * tensor.numel() * 4 / _seconds(lambda: dist.all_reduce(tensor), device)
    slowest = torch.tensor(own, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MIN)
    return float(slowest)
