"""What training takes on a CPU beside products and copies: the host's own time, and what collectives take to begin."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
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
from archon.planner.memory import State
from archon.planner.time import TimeModel
from archon.schema.config import EngineConfig

# So small that its time is the host's.
TINY: dict[str, Any] = {"dim": 16, "n_heads": 2, "n_kv_heads": 1, "head_dim": 8, "hidden_dim": 16, "vocab_size": 32}
# Where products count, in the proportions of a real model.
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
# Pairs of collectives of a round, which share one start of the clock.
REPEATS = 10
# Products between two of them, of a millisecond or two in all, as a block of a small model has.
PRODUCTS = 4
LARGE_BYTES = 2**22


def seconds(work: Callable[[], Any], device: torch.device, rounds: int = ROUNDS) -> float:
    """The median of several rounds after one that is not counted."""
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


def largest(value: float) -> float:
    """The largest of the ranks' numbers."""
    if not dist.is_initialized():
        return value
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def host_seconds() -> tuple[float, float]:
    """Of a layer, forward and backward, and of the rest of a micro-batch, where there is next to nothing to compute."""
    few, many = (_pass_seconds(Qwen3ModelArgs(n_layers=layers, **TINY), 8, torch.float32) for layers in (FEW, MANY))
    layer = max(0.0, (many - few) / (MANY - FEW))
    return layer, max(0.0, few - FEW * layer)


def efficiency(draft: Hardware, dtype: torch.dtype) -> float:
    """The share of the peak that products reach in a pass of a small model, all else being as `draft` says."""
    args, name = Qwen3ModelArgs(**SMALL), str(dtype).removeprefix("torch.")
    config = EngineConfig(path="probe", dtype=name)
    foretold = TimeModel(args, draft, SMALL_TOKENS).step(config, ParallelLayout(), None, State((), ()), SMALL_TOKENS, 1)
    products = foretold.products + foretold.attention
    left = _pass_seconds(args, SMALL_TOKENS, dtype) - (foretold.total - products)
    return min(1.0, products / left) if left > 0 else 1.0


def _pass_seconds(args: Qwen3ModelArgs, tokens: int, dtype: torch.dtype) -> float:
    """A forward and a backward of one document on this process."""
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

    return seconds(work, torch.device("cpu"))


class Collectives(NamedTuple):
    """Seconds of a gather or reduce-scatter, all groups of a size at it, of the slowest rank.

    `hot` is a small one right behind another, `between` a small one between products, where a rank also waits for one
    that is slower; `large` gathers `LARGE_BYTES` from each rank.
    """

    hot: float
    between: float
    large: float


def collectives(ranks: int) -> dict[int, Collectives]:
    """By the size of the group: the smallest that divides the ranks, and all of them."""
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
        return largest(seconds(work, torch.device("cpu"))) / (2 * REPEATS)

    found = {}
    for size in sorted({next(size for size in range(2, ranks + 1) if ranks % size == 0), ranks}):
        group = Group.of(init_device_mesh("cpu", (ranks // size, size), mesh_dim_names=("apart", "within"))["within"])
        hot, alone, busy = timed(group, small, 0), timed(group, None, PRODUCTS), timed(group, small, PRODUCTS)
        found[size] = Collectives(hot, max(hot, busy - alone), timed(group, large, 0))
    return found


def rate(found: Mapping[int, Collectives]) -> float:
    """Bytes/s that a rank of the largest group receives in a large gather."""
    size, of = max(found.items())
    return (size - 1) * LARGE_BYTES / max(of.large - of.hot, 1e-9)


def fit_latency(by_size: Mapping[int, float]) -> tuple[float, float]:
    """Seconds of a collective of two ranks, and what each further one adds. A single size is taken for a ring, whose
    steps are one fewer than its ranks."""
    (few, first), *more = sorted(by_size.items())
    if not more:
        return first / (few - 1), first / (few - 1)
    many, last = more[-1]
    slope = max(0.0, (last - first) / (many - few))
    return max(0.0, first - slope * (few - 2)), slope


class _Blocks(nn.Module):
    """Small blocks, one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleDict({str(layer): nn.Linear(8, 8) for layer in range(count)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers.values():
            x = block(x)
        return x * self.scale


def shard_seconds(ranks: int) -> float:
    """Of gathering a block's weights, or sharing out its gradients, collective included: what each further block
    takes beyond its own work, over the three of them that a step has."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))

    def blocks(count: int, sharded: bool) -> float:
        model, x = _Blocks(count), torch.ones(8, 8)
        if sharded:
            apply_fsdp(model, model.layers, mesh, torch.float32, torch.float32)
        return largest(seconds(lambda: model(x).sum().backward(), torch.device("cpu")))

    whole, shared = ([blocks(count, sharded) for count in (FEW, MANY)] for sharded in (False, True))
    more = [b - a for a, b in (*pairwise(whole), *pairwise(shared))]
    return max(0.0, more[1] - more[0]) / (MANY - FEW) / 3
