"""Private PyTorch APIs of process groups and device meshes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.tensor.debug
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from archon.parallel.torch_parts import require_private_apis

PRIVATE_APIS = (
    "torch.distributed.distributed_c10d._world.pg_map",
    "torch.distributed.distributed_c10d._get_default_group",
    "torch.distributed.distributed_c10d.default_pg_nccl_timeout",
    "torch.distributed.distributed_c10d.default_pg_timeout",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.distributed.distributed_c10d._resolve_process_group",
    "torch.distributed.ProcessGroup._device_types",
    "torch.distributed.ProcessGroup._get_backend",
    "torch.distributed.device_mesh.DeviceMesh._root_mesh",
    "torch.distributed.device_mesh.DeviceMesh._concatenate",
    "torch.distributed.tensor.debug._clear_sharding_prop_cache",
)
require_private_apis("process groups and meshes", PRIVATE_APIS)


def default_group() -> dist.ProcessGroup:
    """Return the group of all processes, which must be initialized."""
    return dist.distributed_c10d._get_default_group()


def run_store() -> dist.Store:
    """Return a separate connection to the rendezvous store, for use by one thread."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()  # missing in the type stubs


def group_by_name(name: str) -> dist.ProcessGroup:
    """Return the group that functional collectives know by `name`."""
    return dist.distributed_c10d._resolve_process_group(cast(Any, name))


def all_groups() -> list[dist.ProcessGroup]:
    """Return every group that this process belongs to."""
    return list(dist.distributed_c10d._world.pg_map)


def set_time_limit(group: dist.ProcessGroup, limit: timedelta) -> None:
    """Set the time limit of the group's later collectives, on all its devices."""
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        if hasattr(backend, "_set_default_timeout"):  # a fake group has none
            backend._set_default_timeout(limit)


def set_default_time_limit(limit: timedelta) -> None:
    """Set the time limit of groups that are made without one."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(dist.distributed_c10d, name, limit)


def time_limit(group: dist.ProcessGroup) -> timedelta:
    """Return the time limit of the group's CPU collectives; PyTorch's default for a group without options."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    return getattr(options, "_timeout", dist.default_pg_timeout)


def build_meshes(device_type: str, world_size: int, grids: Mapping[str, Mapping[str, int]]) -> dict[str, DeviceMesh]:
    """Return one mesh per grid, all of one root, so that a parameter can be sharded over dimensions of several.

    Equal meshes have the same process groups, also those of other layouts: DTensor's caches return a mesh that equals
    the one of an operator's inputs, and `DeviceMesh.__eq__` does not compare groups.

    Args:
        device_type: cpu or cuda.
        world_size: the product of the sizes of every grid.
        grids: the sizes of each grid's dimensions by name, outermost first.

    Returns:
        The mesh of each grid. New process groups are collective: every rank must call this in the same order.
    """
    world = default_group()
    root = _root_mesh(world, device_type, world_size)
    return {name: _grid_mesh(world, root, sizes) for name, sizes in grids.items()}


@cache
def _root_mesh(world: dist.ProcessGroup, device_type: str, world_size: int) -> DeviceMesh:
    """Return the root of all meshes of a default group."""
    # A new default group numbers its groups from 0 again: a cached mesh of the previous one would name other ranks.
    dist.tensor.debug._clear_sharding_prop_cache()
    return init_device_mesh(device_type, (world_size,), mesh_dim_names=("world",))


def _grid_mesh(world: dist.ProcessGroup, root: DeviceMesh, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return the mesh of one grid {dimension: size}, with the groups that equal dimensions of other grids have."""
    ranks = torch.arange(root.size()).view(*sizes.values())
    groups = []
    for dim, (name, size) in enumerate(sizes.items()):
        rows = ranks.movedim(dim, -1).reshape(-1, size).tolist()
        group = root.get_group() if size == root.size() else shared_group(world, name, tuple(map(tuple, rows)))
        assert group is not None  # every rank is in a row
        groups.append(group)
    mesh = DeviceMesh.from_group(groups, root.device_type, mesh=ranks, mesh_dim_names=tuple(sizes))
    mesh._root_mesh = root
    # torch.compile looks up the groups of a mesh in its root's registry, if this version of PyTorch has one.
    getattr(root, "_pg_registry", {}).update(getattr(mesh, "_pg_registry", {}))
    return mesh


@cache
def shared_group(
    world: dist.ProcessGroup, purpose: str, partition: tuple[tuple[int, ...], ...]
) -> dist.ProcessGroup | None:
    """Return this rank's group of disjoint lists of ranks, creating the groups on the first call.

    Args:
        world: the current default group; groups of an earlier one are never returned.
        purpose: the name of the mesh dimension. Groups of the same ranks for other purposes are other groups.
        partition: the ranks of every group, the same on all ranks. Every rank must call it, also one in no group.

    Returns:
        The group, or None if no list has this rank.
    """
    local_group = None
    for ranks in partition:
        group = dist.new_group(list(ranks), group_desc=f"mesh_{purpose}")
        if dist.get_rank() in ranks:
            local_group = group
    return local_group


def concat_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return one mesh with the dimensions of all, which must be of one root."""
    return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(list(meshes))
