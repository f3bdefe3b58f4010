"""Device meshes of several grids with one root and shared process groups."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from archon.parallel.torch_private import clear_mesh_caches, set_root_mesh


def default_group() -> dist.ProcessGroup:
    """Return the group of all processes, which must be initialized."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def build_meshes(device_type: str, world_size: int, grids: Mapping[str, Mapping[str, int]]) -> dict[str, DeviceMesh]:
    """Return one mesh per grid, all of one root, so that a parameter can be sharded over dimensions of several.

    Equal meshes have the same process groups, also in different layouts: DTensor's caches return any mesh that equals
    the mesh of an operator's inputs, and `DeviceMesh.__eq__` does not compare groups.

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
    clear_mesh_caches()
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
    set_root_mesh(mesh, root)
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
