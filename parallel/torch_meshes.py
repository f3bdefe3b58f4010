"""The private parts of PyTorch's device meshes that archon uses: `_unflatten` and `_concatenate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from archon.parallel.torch_parts import require_parts

PARTS = (
    "torch.distributed.device_mesh.DeviceMesh._unflatten",
    "torch.distributed.device_mesh.DeviceMesh._concatenate",
)
require_parts("meshes of ranks", PARTS)


def grids_of_world(device_type: str, world_size: int, grids: Mapping[str, Mapping[str, int]]) -> dict[str, DeviceMesh]:
    """Returns a mesh for each grid {dimension: size}, all of one root, so that a parameter can be sharded over
    dimensions of several. Makes their process groups: every rank must call it."""
    world = init_device_mesh(device_type, (world_size,), mesh_dim_names=("world",))
    return {name: world._unflatten(0, tuple(sizes.values()), tuple(sizes)) for name, sizes in grids.items()}


def concatenated(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Returns one mesh with the dimensions of all, which must be of one root."""
    return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(list(meshes))
