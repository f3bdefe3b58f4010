"""Degrees of a layout, their rules, and the device meshes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from archon.parallel.gloo import init_process_group, use_single_worker_gloo
from archon.schema.errors import LayoutError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

MESH_NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "dp", "dp_shard_cp", "dp_cp", "edp", "ep", "etp", "ep_tp")
"""The names that `get_mesh` and `get_group` accept."""


@dataclass(frozen=True)
class ArchonParallelDims:
    """Degrees of parallelism of a model.

    The ranks form a grid `pp × dp_replicate × dp_shard × cp × tp` with product `world_size`; `dp_shard = -1` fills the
    remaining ranks. Experts reuse ranks of this grid instead of adding to it:

    - `etp = 1`: `ep` borrows from `dp_shard × cp × tp`; each rank of an expert group holds unsharded experts;
    - `etp = tp`: `ep` borrows from `dp_shard × cp`, and each expert is sharded over `tp` as well.

    Examples of 8 ranks: `dp_shard=4, tp=2`: four data-parallel ranks of two tensor-parallel halves.
        `dp_shard=2, tp=4, ep=8`: attention in quarters, every expert unsharded on one of the eight ranks. The same
        with `ep=2, etp=4`: two groups of experts, each in quarters.

    The constructor creates no process group. It raises LayoutError, which names the broken rule.
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    world_size: int = 1
    device_type: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "world_size"):
            value = getattr(self, name)
            filled = name == "dp_shard" and value == -1
            if type(value) is not int or (value < 1 and not filled):
                raise LayoutError(f"{name} must be an integer of at least 1, got {value!r}")
        model_ranks = self.dp_replicate * self.cp * self.tp * self.pp
        if self.dp_shard == -1:
            if self.world_size % model_ranks:
                raise LayoutError(
                    f"dp_shard = -1 needs a world size divisible by dp_replicate × cp × tp × pp = {model_ranks}, "
                    f"got {self.world_size}"
                )
            object.__setattr__(self, "dp_shard", self.world_size // model_ranks)
        product = model_ranks * self.dp_shard
        if product != self.world_size:
            raise LayoutError(
                f"dp_replicate × dp_shard × cp × tp × pp = {self.dp_replicate} × {self.dp_shard} × {self.cp} × "
                f"{self.tp} × {self.pp} = {product}, but the world size is {self.world_size}"
            )
        if self.etp not in (1, self.tp):
            raise LayoutError(f"etp must be 1 or tp = {self.tp}, got {self.etp}")
        lender, name = self.dp_shard * self.cp, "dp_shard × cp"
        if self.etp == 1:
            lender, name = lender * self.tp, "dp_shard × cp × tp"
        if lender % self.ep:
            raise LayoutError(f"ep = {self.ep} must divide {name} = {lender} (etp = {self.etp})")

    @property
    def pp_enabled(self) -> bool:
        """Whether there is more than one pipeline stage."""
        return self.pp > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether data-parallel ranks shard the weights."""
        return self.dp_shard > 1

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are replicas."""
        return self.dp_replicate > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether there is context parallelism."""
        return self.cp > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether there is tensor parallelism."""
        return self.tp > 1

    @property
    def ep_enabled(self) -> bool:
        """Whether there is expert parallelism."""
        return self.ep > 1

    @property
    def etp_enabled(self) -> bool:
        """Whether each expert is sharded by tensor parallelism."""
        return self.etp > 1

    @property
    def fsdp_enabled(self) -> bool:
        """Whether parameters are sharded: over dp_shard × cp."""
        return self.dp_shard_enabled or self.cp_enabled

    @property
    def seq_len_divisor(self) -> int:
        """Micro-batches are padded to a multiple of this many tokens for CP and sequence parallelism."""
        return self.tp * self.cp

    @property
    def context_and_model_parallel_size(self) -> int:
        """Number of ranks that work on the same data-parallel part of the batch."""
        return self.cp * self.tp * self.pp

    @property
    def fsdp_gradient_divide_factor(self) -> int:
        """The number of ranks over which FSDP sums gradients."""
        return self.dp_replicate * self.dp_shard * self.cp

    @property
    def expert_shard(self) -> int:
        """The number of ranks that shard the same experts among themselves."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    def get_mesh(self, name: str) -> DeviceMesh:
        """Return the device mesh of one dimension, or of a product such as `dp_shard_cp`; `ep_tp` has two dimensions.

        The first call creates all process groups and is a collective.
        """
        meshes = _grid_meshes(self)
        if name == "ep_tp":
            return meshes["sparse"]["ep", "etp"]
        for grid, sizes in self.grids.items():
            if name in sizes:
                return meshes[grid][name]
        raise LayoutError(f"unknown mesh {name!r}; known are {', '.join(MESH_NAMES)}")

    @property
    def world_mesh(self) -> DeviceMesh:
        """Mesh of all ranks with dimensions pp, dp_replicate, dp_shard, cp and tp.

        The first use creates all process groups and is a collective.
        """
        return _grid_meshes(self)["dense"]

    def get_group(self, name: str) -> ProcessGroup:
        """Return the process group of `get_mesh(name)`."""
        if name == "ep_tp":
            raise LayoutError("the mesh ep_tp has two dimensions; get the groups of ep and etp instead")
        return self.get_mesh(name).get_group()

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """Mesh over which dense parameters are sharded: `dp_shard_cp`, with `dp_replicate` if enabled."""
        return self._sharding_mesh("fsdp", "dp_shard_cp")

    @property
    def expert_fsdp_mesh(self) -> DeviceMesh:
        """Mesh over which experts are sharded: the ranks with the same experts."""
        return self._sharding_mesh("sparse", "edp")

    def _sharding_mesh(self, grid: str, name: str) -> DeviceMesh:
        mesh = _grid_meshes(self)[grid]
        return mesh["dp_replicate", name] if self.dp_replicate_enabled else mesh[name]

    @property
    def grids(self) -> dict[str, dict[str, int]]:
        """Grids of the ranks, outermost dimension first; each product is `world_size`."""
        data = self.dp_replicate * self.dp_shard
        grids = {
            "dense": {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "cp": self.cp, "tp": self.tp},
            "fsdp": {"dp_replicate": self.dp_replicate, "dp_shard_cp": self.dp_shard * self.cp, "tp": self.tp},
            "batch": {"dp": data, "cp_tp": self.cp * self.tp},
            "loss": {"dp_cp": data * self.cp, "tp": self.tp},
            "sparse": {"dp_replicate": self.dp_replicate, "edp": self.expert_shard, "ep": self.ep, "etp": self.etp},
        }
        return {name: {"pp": self.pp, **sizes} for name, sizes in grids.items()}


def _grid_meshes(dims: ArchonParallelDims) -> dict[str, DeviceMesh]:
    from archon.parallel.mesh import default_group

    ensure_process_group(dims.device_type)
    return _meshes_of_world(default_group(), dims)


@cache
def _meshes_of_world(world: ProcessGroup, dims: ArchonParallelDims) -> dict[str, DeviceMesh]:
    """Return the meshes of a layout in the default group `world`; another default group has other meshes."""
    from archon.parallel.mesh import build_meshes

    return build_meshes(dims.device_type, dims.world_size, dims.grids)


def ensure_process_group(device_type: str) -> None:
    """Create a default process group of this single process, without network or file, if there is none."""
    import torch.distributed as dist

    use_single_worker_gloo()
    if not dist.is_initialized():
        init_process_group(device_type, store=dist.HashStore(), rank=0, world_size=1)
