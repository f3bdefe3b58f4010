"""What is wrong with a layout on real ranks: groups that do not communicate, copies that differ, shards that are not.

Every function is called by all ranks and returns the same on all of them; only integers are sent.
"""

from __future__ import annotations

import hashlib
import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from archon.engine.engine import ArchonEngine
from archon.parallel.collectives import layout_groups
from archon.parallel.comm import Group, all_gather_replicated, all_reduce, all_to_all, reduce_scatter
from archon.parallel.control_plane import ControlPlane
from archon.parallel.dims import ArchonParallelDims
from archon.parallel.fsdp import local_tensor, own_part

# Dimensions a parameter may have; what is reported of one is its bounds in each.
MAX_DIMS = 3


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank: its shards of the weights, of the moments, and the most the process or its GPU has held."""

    parameters: int
    optimizer: int
    peak: int


def _gathered(rows: list[list[int]]) -> Tensor:
    """n rows of k integers on each rank to int64 [ranks, n, k]."""
    return ControlPlane.of_run().all_gather_tensor(torch.tensor(rows))


def _expected_sum(group: Group, x: Tensor) -> bool:
    total = group.size * (group.size + 1) // 2
    return all_reduce(x + group.rank, group).tolist() == [total] * x.numel()


def _expected_gather(group: Group, x: Tensor) -> bool:
    return all_gather_replicated(x + group.rank, group).view(group.size, -1)[:, 0].tolist() == _first(group.size)


def _expected_scatter(group: Group, x: Tensor) -> bool:
    terms = torch.cat([x * (rank + 1) * (group.rank + 1) for rank in range(group.size)])
    total = (group.rank + 1) * group.size * (group.size + 1) // 2
    return reduce_scatter(terms, group).tolist() == [total] * x.numel()


def _expected_exchange(group: Group, x: Tensor) -> bool:
    sent = torch.cat([x + group.rank + 100_000 * rank for rank in range(group.size)])
    found = all_to_all(sent, group).view(group.size, -1)[:, 0] - 100_000 * group.rank
    return found.tolist() == _first(group.size)


def _first(count: int) -> list[int]:
    return list(range(1, count + 1))


COLLECTIVES: dict[str, Callable[[Group, Tensor], bool]] = {
    "all_reduce": _expected_sum,
    "all_gather": _expected_gather,
    "reduce_scatter": _expected_scatter,
    "all_to_all": _expected_exchange,
}


def self_test(dims: ArchonParallelDims, device: torch.device) -> list[str]:
    """Run every collective over every group of the layout on known numbers; a line for each that a rank got wrong,
    with the mesh dimension and those ranks, none where all is well."""
    groups = [(name, Group.of_process_group(pg)) for name, pg in layout_groups(dims)]
    ones = torch.ones(4, dtype=torch.int64, device=device)
    wrong = [[int(not check(group, ones)) for check in COLLECTIVES.values()] for _, group in groups]
    if not groups:
        return []
    found = _gathered(wrong)
    return [
        f"{collective} over {name} is wrong on {_ranks(found[:, row, column].nonzero().flatten().tolist())}"
        for row, (name, _) in enumerate(groups)
        for column, collective in enumerate(COLLECTIVES)
        if found[:, row, column].any()
    ]


def inconsistencies(engine: ArchonEngine) -> list[str]:
    """Parts of parameters, and balancing biases, of which several ranks hold copies that are not bitwise equal.

    What must be equal follows from where a rank's part lies in the whole: the same part of the same parameter, be the
    ranks replicas, tensor-parallel neighbors or the two ends of a pipeline that share a tied matrix. A line each,
    with the ranks that differ from most.
    """
    names = sorted(engine.adapter.native_shapes)
    names += [f"layers.{layer}.moe.router.expert_bias" for layer in range(engine.args.n_layers)]
    index = {name: number for number, name in enumerate(names)}
    if engine.adapter.is_tied:
        index["output.weight"] = index["tok_embeddings.weight"]
    rows = [row for name, tensor in _state(engine) if name in index for row in _row(index[name], tensor)]
    count = ControlPlane.of_run().all_reduce_max(len(rows))
    rows += [[-1] * (2 + 2 * MAX_DIMS)] * (count - len(rows))
    found = _gathered(rows).tolist()
    copies: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
    for rank, parts in enumerate(found):
        for *part, digest in parts:
            copies[tuple(part)][rank] = digest
    lines = []
    for part, digests in sorted(copies.items()):
        if part[0] < 0 or len(set(digests.values())) == 1:
            continue
        common = Counter(digests.values()).most_common(1)[0][0]
        differ = [rank for rank, digest in digests.items() if digest != common]
        agree = [rank for rank, digest in digests.items() if digest == common]
        lines.append(f"{names[part[0]]}: {_ranks(differ)} differ from {_ranks(agree)} in what should be a copy")
    return lines


def _state(engine: ArchonEngine) -> Iterator[tuple[str, Tensor]]:
    yield from engine.model.named_parameters(remove_duplicate=False)
    yield from engine.model.named_buffers()


def _row(number: int, tensor: Tensor) -> Iterator[list[int]]:
    """Name, bounds in each dimension and a digest of this rank's part; nothing for an empty one."""
    held = local_tensor(tensor).detach()
    if not held.numel():
        return
    content = held.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    digest = hashlib.blake2b(content, digest_size=8).digest()
    bounds = [edge for part in own_part(tensor) for edge in (part.start, part.stop)]
    bounds += [0] * (2 * MAX_DIMS - len(bounds))
    yield [number, *bounds, int.from_bytes(digest, "little", signed=True)]


def _ranks(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def memory(engine: ArchonEngine) -> list[RankMemory]:
    """Returns one report per rank, in rank order."""
    state = [] if engine.optimizer is None else engine.optimizer.state.values()
    moments = [local_tensor(x) for per in state for x in per.values() if isinstance(x, Tensor)]
    own = [local_tensor(parameter) for parameter in engine.model.parameters()]
    if engine.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(engine.device)
    else:  # KiB, but on macOS bytes
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    sizes = [sum(x.numel() * x.element_size() for x in tensors) for tensors in (own, moments)]
    return [RankMemory(*row) for row in _gathered([[*sizes, peak]])[:, 0].tolist()]


@dataclass(frozen=True)
class ParameterPlacement:
    """How the parameters of one name (layers as `*`) lie: `shape` of the whole, `local` of this rank's part, `places`
    such as `dp_shard_cp: dim 0`.

    `sharded`: FSDP cuts it. `uneven`: its ranks do not hold equally much.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    local: tuple[int, ...]
    places: tuple[str, ...]
    sharded: bool
    uneven: bool


def placements(engine: ArchonEngine) -> list[ParameterPlacement]:
    """Every parameter of this rank, those that differ in the layer alone as one."""
    found: dict[ParameterPlacement, int] = Counter()
    for name, parameter in engine.model.named_parameters():
        parts = ["*" if part.isdigit() else part for part in name.split(".")]
        found[_placement(".".join(parts), parameter)] += 1
    return [
        ParameterPlacement(p.name, count, p.shape, p.local, p.places, p.sharded, p.uneven) for p, count in found.items()
    ]


def _placement(name: str, parameter: Tensor) -> ParameterPlacement:
    shape, local = tuple(parameter.shape), tuple(local_tensor(parameter).shape)
    if not isinstance(parameter, DTensor):
        return ParameterPlacement(name, 0, shape, local, (), False, False)
    mesh = parameter.device_mesh
    places, sharded, ways = [], False, [1] * len(shape)
    for dim, (axis, placement) in enumerate(zip(mesh.mesh_dim_names or (), parameter.placements, strict=True)):
        if placement.is_replicate():
            places.append(f"{axis}: copies")
            continue
        cut = placement.dim  # type: ignore[attr-defined]
        places.append(f"{axis}: dim {cut}")
        ways[cut] *= mesh.size(dim)
        sharded |= axis in ("dp_shard_cp", "edp")
    uneven = any(size % parts for size, parts in zip(shape, ways, strict=True))
    return ParameterPlacement(name, 0, shape, local, tuple(places), sharded, uneven)
