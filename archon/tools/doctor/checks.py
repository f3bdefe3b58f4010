"""Checks of a layout on real ranks: collectives of every group, equality of replicas, memory, placements.

Every function except `placements` is a collective with the same result on all ranks; only integers are communicated.
"""

from __future__ import annotations

import hashlib
import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from archon.engine.engine import ArchonEngine
from archon.models.lora.model import is_lora
from archon.parallel.collectives import layout_groups
from archon.parallel.comm import Group, all_gather_replicated, all_reduce, all_to_all, reduce_scatter
from archon.parallel.control_plane import ControlPlane
from archon.parallel.dims import ArchonParallelDims
from archon.parallel.fsdp import local_region, local_tensor

MAX_DIMS = 5  # of a parameter; the patch embedding of a vision encoder has most


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank: shards of weights and moments, and the peak of the GPU or else of the process."""

    parameters: int
    optimizer: int
    peak: int


def _all_gather_rows(rows: list[list[int]]) -> Tensor:
    """Gather n rows of k integers from every rank: int64 [ranks, n, k]."""
    return ControlPlane.world().all_gather_tensor(torch.tensor(rows))


def _check_all_reduce(group: Group, x: Tensor) -> bool:
    total = group.size * (group.size + 1) // 2
    return all_reduce(x + group.rank, group).tolist() == [total] * x.numel()


def _check_all_gather(group: Group, x: Tensor) -> bool:
    gathered = all_gather_replicated(x + group.rank, group).view(group.size, -1)[:, 0]
    return gathered.tolist() == [*range(1, group.size + 1)]


def _check_reduce_scatter(group: Group, x: Tensor) -> bool:
    terms = torch.cat([x * (rank + 1) * (group.rank + 1) for rank in range(group.size)])
    total = (group.rank + 1) * group.size * (group.size + 1) // 2
    return reduce_scatter(terms, group).tolist() == [total] * x.numel()


def _check_all_to_all(group: Group, x: Tensor) -> bool:
    sent = torch.cat([x + group.rank + 100_000 * rank for rank in range(group.size)])
    received = all_to_all(sent, group).view(group.size, -1)[:, 0] - 100_000 * group.rank
    return received.tolist() == [*range(1, group.size + 1)]


COLLECTIVES: dict[str, Callable[[Group, Tensor], bool]] = {
    "all_reduce": _check_all_reduce,
    "all_gather": _check_all_gather,
    "reduce_scatter": _check_reduce_scatter,
    "all_to_all": _check_all_to_all,
}


def self_test(dims: ArchonParallelDims, device: torch.device) -> list[str]:
    """Run every collective over every group of the layout on known numbers.

    Returns:
        A line for each mesh dimension and collective with a wrong result, with the affected ranks.
    """
    groups = [(name, Group.from_process_group(pg)) for name, pg in layout_groups(dims)]
    if not groups:
        return []
    ones = torch.ones(4, dtype=torch.int64, device=device)
    wrong = _all_gather_rows([[int(not check(group, ones)) for check in COLLECTIVES.values()] for _, group in groups])
    return [
        f"{collective} over {name} is wrong on {_ranks(wrong[:, row, column].nonzero().flatten().tolist())}"
        for row, (name, _) in enumerate(groups)
        for column, collective in enumerate(COLLECTIVES)
        if wrong[:, row, column].any()
    ]


def replica_mismatches(engine: ArchonEngine) -> list[str]:
    """Return a line for each region of a weight, LoRA or balancing bias with replicas that are not bitwise equal.

    Replicas are ranks with the same region of the same parameter: data-parallel replicas, tensor-parallel ranks of an
    unsharded parameter, or the first and last pipeline stages of a tied matrix. A line names the ranks that differ from
    the majority.
    """
    names = sorted(engine.adapter.native_shapes)
    names += [f"layers.{layer}.moe.router.expert_bias" for layer in range(engine.args.n_layers)]
    names += [name for name, _ in engine.meta_model().named_parameters() if is_lora(name)]
    index = {name: number for number, name in enumerate(names)}
    if engine.adapter.is_tied:
        index["output.weight"] = index["tok_embeddings.weight"]
    state = [*engine.model.named_parameters(remove_duplicate=False), *engine.model.named_buffers()]
    rows = [
        _digest_row(index[name], tensor) for name, tensor in state if name in index and local_tensor(tensor).numel()
    ]
    count = ControlPlane.world().all_reduce_max(len(rows))
    rows += [[-1] * (2 + 2 * MAX_DIMS)] * (count - len(rows))
    replicas: dict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
    for rank, rank_rows in enumerate(_all_gather_rows(rows).tolist()):
        for *region, digest in rank_rows:
            replicas[tuple(region)][rank] = digest
    lines = []
    for region, digests in sorted(replicas.items()):
        if region[0] < 0 or len(set(digests.values())) == 1:
            continue
        common = Counter(digests.values()).most_common(1)[0][0]
        differ = [rank for rank, digest in digests.items() if digest != common]
        agree = [rank for rank, digest in digests.items() if digest == common]
        lines.append(f"{names[region[0]]}: {_ranks(differ)} differ from {_ranks(agree)}, but replicas must be equal")
    return lines


def _digest_row(number: int, tensor: Tensor) -> list[int]:
    """Return [parameter number, bounds of this rank's region in each dimension, digest of its data]."""
    data = local_tensor(tensor).detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    digest = hashlib.blake2b(data, digest_size=8).digest()
    bounds = [edge for part in local_region(tensor) for edge in (part.start, part.stop)]
    bounds += [0] * (2 * MAX_DIMS - len(bounds))
    return [number, *bounds, int.from_bytes(digest, "little", signed=True)]


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def memory(engine: ArchonEngine) -> list[RankMemory]:
    """Return the memory of every rank, in rank order."""
    optimizers = [engine.optimizer, *(lora.optimizer for lora in engine.loras.values())]
    state = [per for optimizer in optimizers if optimizer is not None for per in optimizer.state.values()]
    moments = [local_tensor(x) for per in state for x in per.values() if isinstance(x, Tensor)]
    weights = [local_tensor(parameter) for parameter in engine.model.parameters()]
    if engine.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(engine.device)
    else:  # in KiB, on macOS in bytes
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    sizes = [sum(x.numel() * x.element_size() for x in tensors) for tensors in (weights, moments)]
    return [RankMemory(*row) for row in _all_gather_rows([[*sizes, peak]])[:, 0].tolist()]


@dataclass(frozen=True)
class ParameterPlacement:
    """Placement of the parameters with one name, in which layer indices are `*`.

    Attributes:
        count: number of these parameters on this rank.
        shape: full shape.
        local: shape of this rank's part.
        places: placement by mesh dimension, such as `dp_shard_cp: dim 0`.
        sharded: whether FSDP shards the parameter.
        uneven: whether the parts of ranks differ in size.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    local: tuple[int, ...]
    places: tuple[str, ...]
    sharded: bool
    uneven: bool


def placements(engine: ArchonEngine) -> list[ParameterPlacement]:
    """Return the placements of this rank's parameters; equal placements in several layers are counted together."""
    counts: Counter[ParameterPlacement] = Counter()
    for name, parameter in engine.model.named_parameters():
        parts = ["*" if part.isdigit() else part for part in name.split(".")]
        counts[_placement(".".join(parts), parameter)] += 1
    return [replace(placement, count=count) for placement, count in counts.items()]


def _placement(name: str, parameter: Tensor) -> ParameterPlacement:
    shape, places, sharded, parts = tuple(parameter.shape), [], False, [1] * parameter.ndim
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for dim, (axis, placement) in enumerate(zip(mesh.mesh_dim_names or (), parameter.placements, strict=True)):
            if placement.is_replicate():
                places.append(f"{axis}: copies")
                continue
            split = placement.dim  # type: ignore[attr-defined]
            places.append(f"{axis}: dim {split}")
            parts[split] *= mesh.size(dim)
            sharded |= axis in ("dp_shard_cp", "edp")
    uneven = any(size % count for size, count in zip(shape, parts, strict=True))
    return ParameterPlacement(name, 0, shape, tuple(local_tensor(parameter).shape), tuple(places), sharded, uneven)
