"""Microbenchmarks of training's overheads on a CPU: host time, latency and bandwidth of collectives, FSDP."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from archon.models.qwen3 import Qwen3Model, Qwen3ModelArgs
from archon.parallel.comm import Group, all_gather, reduce_scatter
from archon.parallel.fsdp import apply_fsdp
from archon.parallel.layout import ParallelLayout
from archon.planner.hardware import Hardware
from archon.planner.memory_model import RankParameters
from archon.planner.time_model import TimeModel
from archon.schema.config import EngineConfig

# So small that nearly all of its time is host time.
TINY: dict[str, Any] = {"dim": 16, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "hidden_dim": 16, "vocab_size": 32}
# Large enough for matrix products to matter, in the proportions of a real model.
SMALL: dict[str, Any] = {
    "dim": 256,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 64,
    "hidden_dim": 768,
    "vocab_size": 2048,
}
SMALL_TOKENS = 512
FEW, MANY = 2, 6
ROUNDS = 7
# Pairs of collectives timed together in a round.
REPEATS = 10
# Matrix products between two collectives: one or two milliseconds, as in a block of a small model.
PRODUCTS = 4
LARGE_BYTES = 2**22


def median_seconds(work: Callable[[], Any], device: torch.device, rounds: int = ROUNDS) -> float:
    """Returns the median seconds of several calls of `work`, after a warm-up call that is not counted."""
    times = []
    for _ in range(rounds + 1):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def max_over_ranks(value: float) -> float:
    """Returns the maximum of `value` over all ranks. A collective."""
    if not dist.is_initialized():
        return value
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def host_seconds() -> tuple[float, float]:
    """Returns host seconds of a layer, forward and backward, and of the rest of a micro-batch, by a tiny model."""
    few, many = (_pass_seconds(Qwen3ModelArgs(n_layers=layers, **TINY), 8, torch.float32) for layers in (FEW, MANY))
    layer = max(0.0, (many - few) / (MANY - FEW))
    return layer, max(0.0, few - FEW * layer)


def product_efficiency(draft: Hardware, dtype: torch.dtype) -> float:
    """Returns the share of the peak that matrix products reach in a pass of a small model.

    The time of everything else is taken to be what the time model predicts for `draft`.
    """
    args, name = Qwen3ModelArgs(**SMALL), str(dtype).removeprefix("torch.")
    config, model = EngineConfig(path="probe", dtype=name), TimeModel(args, draft, SMALL_TOKENS)
    predicted = model.step(config, ParallelLayout(), None, RankParameters(), SMALL_TOKENS, 1)
    products = predicted.products + predicted.attention
    measured = _pass_seconds(args, SMALL_TOKENS, dtype) - (predicted.total - products)
    return min(1.0, products / measured) if measured > 0 else 1.0


def _pass_seconds(args: Qwen3ModelArgs, tokens: int, dtype: torch.dtype) -> float:
    """Returns seconds of a forward and a backward of one document in this process."""
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
    """Seconds of an all-gather or reduce-scatter on the slowest rank, with all groups of a size running it.

    `back_to_back` is of a small one directly after another, `between_products` of a small one between matrix products,
    where a rank also waits for slower ones; `large` is of one that gathers `LARGE_BYTES` from each rank.
    """

    back_to_back: float
    between_products: float
    large: float


def time_collectives(ranks: int) -> dict[int, CollectiveTimes]:
    """Returns times by group size: of the smallest groups that divide the ranks, and of all ranks. A collective."""
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

    found = {}
    for size in sorted({next(size for size in range(2, ranks + 1) if ranks % size == 0), ranks}):
        group = Group.of(init_device_mesh("cpu", (ranks // size, size), mesh_dim_names=("apart", "within"))["within"])
        back_to_back = timed(group, small, 0)
        products, both = timed(group, None, PRODUCTS), timed(group, small, PRODUCTS)
        found[size] = CollectiveTimes(back_to_back, max(back_to_back, both - products), timed(group, large, 0))
    return found


def gather_bandwidth(by_size: Mapping[int, CollectiveTimes]) -> float:
    """Returns bytes/s that a rank of the largest group receives in a large all-gather, without its latency."""
    size, times = max(by_size.items())
    return (size - 1) * LARGE_BYTES / max(times.large - times.back_to_back, 1e-9)


def fit_latency(by_size: Mapping[int, float]) -> tuple[float, float]:
    """Returns the latency in seconds of a collective of two ranks, and what each further rank adds.

    With times of a single group size, assumes a ring, which has one step fewer than ranks.
    """
    (few, first), *more = sorted(by_size.items())
    if not more:
        return first / (few - 1), first / (few - 1)
    many, last = more[-1]
    slope = max(0.0, (last - first) / (many - few))
    return max(0.0, first - slope * (few - 2)), slope


class _SmallBlocks(nn.Module):
    """A model of small sequential blocks."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleDict({str(layer): nn.Linear(8, 8) for layer in range(count)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers.values():
            x = block(x)
        return x * self.scale


def shard_seconds(ranks: int) -> float:
    """Returns seconds of FSDP to gather a block's weights or reduce-scatter its gradients, collective included.

    It is what FSDP adds to the time of each further block, divided by the three such operations of a step. A
    collective.
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
