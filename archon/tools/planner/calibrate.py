"""Measurement of hardware figures that data sheets do not state.

Every rank of a process group calls `calibrate`. It measures copies, collectives and, on a GPU, each kind of kernel of a
training step; on a CPU matmuls, a pass of a small model and FSDP over small blocks. It runs no training step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from archon.engine.memory.memory_model import RankParameters
from archon.models.layers.matmul import mm
from archon.models.qwen3 import Qwen3Model, Qwen3ModelArgs
from archon.parallel.comm import Group, all_gather, reduce_scatter
from archon.parallel.control_plane import ControlPlane
from archon.parallel.fsdp import apply_fsdp
from archon.parallel.layout import ParallelLayout
from archon.schema.config import EngineConfig
from archon.schema.errors import ConfigError
from archon.tools.planner.hardware import Hardware, known_hardware, read_hardware
from archon.tools.planner.kernel_rates import (
    GPU_SIZES,
    KernelSizes,
    measure_attention,
    measure_experts,
    measure_fp8_matmuls,
    measure_head_passes,
    measure_launch,
    measure_matmuls,
    median_seconds,
)
from archon.tools.planner.time_model import TimeModel

# Rows, columns and inner size of a CPU's matmul; elements of the copied and of the all-reduced tensor.
CPU_GEMM = 1024
COPY_BYTES = {"cuda": 2**29, "cpu": 2**24}
ALL_REDUCE_ELEMENTS = 2**27
ROUNDS = 5
# Small enough that nearly all of its time is host time.
TINY: dict[str, Any] = {"dim": 16, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "hidden_dim": 16, "vocab_size": 32}
# Large enough for matmuls to matter, in the proportions of a real model.
SMALL = Qwen3ModelArgs(dim=256, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64, hidden_dim=768, vocab_size=2048)
SMALL_TOKENS = 512
FEW, MANY = 2, 6
# Pairs of collectives timed together.
REPEATS = 10
# Matmuls between two collectives: one or two milliseconds, as in a block of a small model.
PRODUCTS = 4
LARGE_BYTES = 2**22
# On a CPU only matmuls and copies are measured; other kinds of kernels have these values.
CPU_KERNELS: dict[str, Any] = {
    "grouped_gemm_efficiency": None,
    "fp8_efficiency": None,
    "attention": {},
    "head_passes": 6,
    "launch_s": 0.0,
}


def calibrate(like: str, device: torch.device, dtype: torch.dtype) -> Hardware:
    """Return the hardware `like` with the efficiencies measured on this machine. A collective.

    On a CPU the peaks are measured too, and a node has as many ranks as run now. A single rank measures no links and
    keeps the link figures of `like`.
    """
    known = read_hardware(like)
    if device.type == "cpu":
        return _calibrate_cpu(known, dtype)
    _check_name(like, torch.cuda.get_device_name(device))
    measured: dict[str, Any] = {
        "name": f"{like}-calibrated",
        **measure_kernels(known, device, dtype, GPU_SIZES),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory,
    }
    if ControlPlane.world().size > 1:
        in_node = ControlPlane.world().size <= known.gpus_per_node
        bandwidth = known.node_bandwidth if in_node else known.network_bandwidth
        measured["link_efficiency"] = _efficiency("all-reduces", _link(device), bandwidth)
    return Hardware.model_validate(known.model_dump() | measured)


def measure_kernels(known: Hardware, device: torch.device, dtype: torch.dtype, sizes: KernelSizes) -> dict[str, Any]:
    """Return the measured rate of each kind of kernel, as fields of `Hardware`."""
    peak, fp8_peak = known.flops(str(dtype).removeprefix("torch.")), known.fp8_flops
    matmuls, bandwidth = measure_matmuls(device, dtype, sizes), _memory(device)
    rates: dict[str, Any] = {
        "gemm_efficiency": _efficiency("matmuls", matmuls, peak),
        "grouped_gemm_efficiency": _efficiency("matmuls of experts", measure_experts(device, dtype, sizes), peak),
        "attention": measure_attention(device, dtype, sizes),
        "head_passes": measure_head_passes(device, dtype, sizes, matmuls, bandwidth),
        "launch_s": measure_launch(device, sizes),
        "memory_efficiency": _efficiency("copies", bandwidth, known.memory_bandwidth),
    }
    if fp8_peak:
        rates["fp8_efficiency"] = _efficiency("FP8 matmuls", measure_fp8_matmuls(device, sizes), fp8_peak)
    return rates


def _calibrate_cpu(known: Hardware, dtype: torch.dtype) -> Hardware:
    """Measure the speed of a single rank, the number of ranks that reach it at once, and the cost of collectives.

    Times measured on all ranks at once are divided by the oversubscription, because the time model multiplies by it.
    """
    device, world = torch.device("cpu"), ControlPlane.world()
    gemm, processors = _measure_matmuls(dtype, world)
    narrow = dtype == torch.bfloat16
    other = _measure_on_rank0(lambda: _gemm(device, torch.float32 if narrow else torch.bfloat16), world)
    memory = _measure_on_rank0(lambda: _memory(device), world)
    layer, micro_batch = _measure_on_rank0(host_seconds, world)
    measured: dict[str, Any] = {
        "name": "cpu",
        "bf16_flops": gemm if narrow else other,
        "fp32_flops": other if narrow else gemm,
        "fp8_flops": 0.0,  # emulated
        "gemm_efficiency": 1.0,
        **CPU_KERNELS,
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
    efficiency = _measure_on_rank0(lambda: matmul_efficiency(draft, dtype), world)
    return draft.model_copy(update={"gemm_efficiency": efficiency})


def _check_name(like: str, device_name: str) -> None:
    """Raise ConfigError if this GPU is known hardware other than `like`."""
    here = next((name for name in known_hardware() if name.split("-")[0].upper() in device_name), like)
    if like in known_hardware() and here.split("-")[0] != like.split("-")[0]:
        raise ConfigError(f"this GPU is {device_name}, not {like}; set --gpu {here}")


def _efficiency(operation: str, reached: float, peak: float) -> float:
    if reached > 1.05 * peak:
        raise ConfigError(
            f"measured {operation} reach {reached:.3g} per second, above the hardware's peak of {peak:.3g}; set --gpu "
            "to the GPU of this machine"
        )
    return min(reached / peak, 1.0)


def _measure_matmuls(dtype: torch.dtype, world: ControlPlane) -> tuple[float, float]:
    """Return the FLOP/s of a single rank, and the ratio of the FLOP/s of all ranks to it.

    Alternates between the two measurements, because the load of other programs may change. A single process computes
    the ratio from its cores.
    """
    device = torch.device("cpu")
    if world.size == 1:
        cores = len(os.sched_getaffinity(0)) / torch.get_num_threads()
        return _gemm(device, dtype), max(1.0, cores)
    alone, together = [], []
    for _ in range(ROUNDS):
        alone.append(_measure_on_rank0(lambda: _gemm(device, dtype, 1), world))
        world.barrier()
        flops = torch.tensor(_gemm(device, dtype, 1), dtype=torch.float64)
        dist.all_reduce(flops)
        together.append(float(flops))
    processors = median(total / one for total, one in zip(together, alone, strict=True))
    return median(alone), min(max(processors, 1.0), world.size)


def _measure_on_rank0(measure: Callable[[], Any], world: ControlPlane) -> Any:
    """Return the result of rank 0 on every rank; the other ranks wait while it measures."""
    world.barrier()
    return world.broadcast_json(measure)


def _gemm(device: torch.device, dtype: torch.dtype, rounds: int = ROUNDS) -> float:
    """Return FLOP/s of a large matmul with the models' kernel."""
    n = CPU_GEMM
    left, right = (torch.randn(n, n, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    return 2 * n**3 / median_seconds(lambda: mm(left, right), device, rounds)


def _memory(device: torch.device) -> float:
    """Return bytes/s read and written by a copy."""
    source = torch.zeros(COPY_BYTES[device.type], device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / median_seconds(lambda: target.copy_(source), device, ROUNDS)


def _link(device: torch.device) -> float:
    """Return bytes/s that the slowest rank sends in an all-reduce: nccl-tests' bus bandwidth, factor 2 (n - 1) / n."""
    n, tensor = ControlPlane.world().size, torch.zeros(ALL_REDUCE_ELEMENTS, device=device)
    sent = 2 * (n - 1) / n * tensor.numel() * 4
    return -max_over_ranks(-sent / median_seconds(lambda: dist.all_reduce(tensor), device, ROUNDS))


def max_over_ranks(value: float) -> float:
    """Return the maximum of `value` over all ranks. A collective."""
    if not dist.is_initialized():
        return value
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def host_seconds() -> tuple[float, float]:
    """Return host seconds of a layer (forward and backward) and of the rest of a micro-batch, from a tiny model."""
    few, many = (_pass_seconds(Qwen3ModelArgs(n_layers=layers, **TINY), 8, torch.float32) for layers in (FEW, MANY))
    layer = max(0.0, (many - few) / (MANY - FEW))
    return layer, max(0.0, few - FEW * layer)


def matmul_efficiency(draft: Hardware, dtype: torch.dtype) -> float:
    """Return the fraction of the peak that matmuls reach in a pass of a small model.

    The time of the matmuls is the measured time minus the predicted time of all other operations on `draft`.
    """
    config = EngineConfig(path="small", dtype=str(dtype).removeprefix("torch."))
    model = TimeModel(SMALL, draft, SMALL_TOKENS)
    predicted = model.step(config, ParallelLayout(), None, RankParameters(), SMALL_TOKENS, 1)
    products = predicted.products + predicted.attention
    measured = _pass_seconds(SMALL, SMALL_TOKENS, dtype) - (predicted.total - products)
    return min(1.0, products / measured) if measured > 0 else 1.0


def _pass_seconds(args: Qwen3ModelArgs, tokens: int, dtype: torch.dtype) -> float:
    """Return seconds of a forward and a backward of one document in this process."""
    model = Qwen3Model(args)
    model.init_weights()
    model.to(dtype)
    model.init_buffers("cpu")
    ids, bounds = torch.arange(tokens) % args.vocab_size, torch.tensor([0, tokens], dtype=torch.int32)
    weights = torch.ones(tokens)

    def work() -> None:
        model.zero_grad()
        scores = model(ids, torch.arange(tokens), bounds, tokens, labels=ids, entropy=False, loss_weights=weights)
        scores.loss.backward()

    return median_seconds(work, torch.device("cpu"))


class CollectiveTimes(NamedTuple):
    """Seconds of an all-gather or reduce-scatter on the slowest rank, while all groups of a size run it.

    Attributes:
        back_to_back: small collectives in a row.
        between_products: a small collective between matmuls; includes the wait for slower ranks.
        large: gathers `LARGE_BYTES` from each rank.
    """

    back_to_back: float
    between_products: float
    large: float


def time_collectives(ranks: int) -> dict[int, CollectiveTimes]:
    """Return times of the smallest groups that divide the ranks and of all ranks, by group size. A collective."""
    left, right = torch.randn(128, 256), torch.randn(256, 768)
    small, large = torch.zeros(1), torch.zeros(LARGE_BYTES // 4)

    def timed(group: Group, x: Tensor | None, products: int) -> float:
        def work() -> None:
            y = x
            for collective in (all_gather, reduce_scatter) * REPEATS:
                for _ in range(products):
                    torch.matmul(left, right)
                if y is not None:
                    y = collective(y, group)

        dist.barrier()
        return max_over_ranks(median_seconds(work, torch.device("cpu"))) / (2 * REPEATS)

    times = {}
    for size in sorted({next(size for size in range(2, ranks + 1) if ranks % size == 0), ranks}):
        group = Group.from_mesh(
            init_device_mesh("cpu", (ranks // size, size), mesh_dim_names=("groups", "ranks"))["ranks"]
        )
        back_to_back = timed(group, small, 0)
        products, both = timed(group, None, PRODUCTS), timed(group, small, PRODUCTS)
        times[size] = CollectiveTimes(back_to_back, max(back_to_back, both - products), timed(group, large, 0))
    return times


def gather_bandwidth(by_size: Mapping[int, CollectiveTimes]) -> float:
    """Return bytes/s that a rank of the largest group receives in a large all-gather, latency excluded."""
    size, times = max(by_size.items())
    return (size - 1) * LARGE_BYTES / max(times.large - times.back_to_back, 1e-9)


def fit_latency(by_size: Mapping[int, float]) -> tuple[float, float]:
    """Return the latency of a collective of two ranks, and the latency added per further rank, in seconds.

    A single group size is assumed to be a ring of size - 1 equal steps.
    """
    (few, first), *more = sorted(by_size.items())
    if not more:
        return first / (few - 1), first / (few - 1)
    many, last = more[-1]
    slope = max(0.0, (last - first) / (many - few))
    return max(0.0, first - slope * (few - 2)), slope


class _SmallBlocks(nn.Module):
    """Model of small sequential blocks."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleDict({str(layer): nn.Linear(8, 8) for layer in range(count)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers.values():
            x = block(x)
        return x * self.scale


def shard_seconds(ranks: int) -> float:
    """Return FSDP's seconds to gather a block's weights or reduce-scatter its gradients. A collective.

    FSDP adds three such operations per block and step.
    """
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))

    def step_seconds(count: int, sharded: bool) -> float:
        model, x = _SmallBlocks(count), torch.ones(8, 8)
        if sharded:
            apply_fsdp(model, model.layers, mesh, torch.float32, torch.float32)
        return max_over_ranks(median_seconds(lambda: model(x).sum().backward(), torch.device("cpu")))

    plain, sharded = ([step_seconds(count, sharded) for count in (FEW, MANY)] for sharded in (False, True))
    added = [many - few for few, many in (plain, sharded)]
    return max(0.0, added[1] - added[0]) / (MANY - FEW) / 3
