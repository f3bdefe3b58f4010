"""The private parts of PyTorch's process groups and device meshes that archon uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from archon.parallel.torch_parts import require_parts

PARTS = (
    "torch.distributed.distributed_c10d._world.pg_map",
    "torch.distributed.distributed_c10d._get_default_group",
    "torch.distributed.distributed_c10d.default_pg_nccl_timeout",
    "torch.distributed.distributed_c10d.default_pg_timeout",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.distributed.distributed_c10d._resolve_process_group",
    "torch.distributed.ProcessGroup._device_types",
    "torch.distributed.ProcessGroup._get_backend",
    "torch.distributed.device_mesh.DeviceMesh._unflatten",
    "torch.distributed.device_mesh.DeviceMesh._concatenate",
)
require_parts("process groups and meshes", PARTS)


def default_group() -> dist.ProcessGroup:
    """Returns the group of all processes, which must be initialized."""
    return dist.distributed_c10d._get_default_group()


def store_of_run() -> dist.Store:
    """Returns a connection of its own, for one thread, to the store in which the processes of the run met."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()  # which the type stubs lack


def group_by_name(name: str) -> dist.ProcessGroup:
    """Returns the group that functional collectives know by `name`."""
    return dist.distributed_c10d._resolve_process_group(cast(Any, name))


def all_groups() -> list[dist.ProcessGroup]:
    """Returns every group that this process belongs to."""
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
    """Returns the time limit of the group's CPU collectives; PyTorch's default for a group without options."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    return getattr(options, "_timeout", dist.default_pg_timeout)


def grids_of_world(device_type: str, world_size: int, grids: Mapping[str, Mapping[str, int]]) -> dict[str, DeviceMesh]:
    """Returns a mesh for each grid {dimension: size}, all of one root, so that a parameter can be sharded over
    dimensions of several. Makes their process groups: every rank must call it."""
    world = init_device_mesh(device_type, (world_size,), mesh_dim_names=("world",))
    return {name: world._unflatten(0, tuple(sizes.values()), tuple(sizes)) for name, sizes in grids.items()}


def concatenated(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Returns one mesh with the dimensions of all, which must be of one root."""
    return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(list(meshes))
