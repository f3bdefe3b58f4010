"""Expert parallelism (GShard: Lepikhin et al. 2020, arXiv:2006.16668): each rank keeps some experts and sends every
token to those it chose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from archon.parallel.comm import Group, all_to_all
from archon.parallel.tensor import shard
from archon.parallel.torch_meshes import concatenated
from archon.schema.errors import LayoutError


class DispatchRecord(NamedTuple):
    """What `combine` needs to undo a `dispatch`: row counts sent and received by rank, and the order of the rows."""

    sent: list[int]
    received: list[int]
    order: Tensor


@dataclass(frozen=True)
class ExpertParallel:
    """Rows to the ranks of their experts and back; rank r keeps the r-th part of the experts."""

    group: Group

    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, DispatchRecord]:
        """Rows [n, dim] in the order of all E experts, int64 counts [E], to this rank's experts' rows.

        Returns rows [m, dim] in the order of the E / size own experts, int64 counts of each, and the record for
        `combine`. The host waits once, for how many rows go where.
        """
        size = self.group.size
        by_rank = counts.unflatten(0, (size, -1))
        incoming = all_to_all(by_rank.contiguous(), self.group)
        sent, received = torch.stack((by_rank.sum(1), incoming.sum(1))).tolist()
        rows = all_to_all(rows, self.group, received, sent)
        # They come by rank and, within a rank, by expert; the experts want them the other way round.
        lengths = incoming.t().flatten()
        starts = (incoming.flatten().cumsum(0) - incoming.flatten()).unflatten(0, incoming.shape).t().flatten()
        total = rows.shape[0]
        shift = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths, output_size=total)
        order = shift + torch.arange(total, device=rows.device)
        return rows.index_select(0, order), incoming.sum(0), DispatchRecord(sent, received, order)

    def combine(self, rows: Tensor, record: DispatchRecord) -> Tensor:
        """Undo `dispatch` for what the experts made of the rows: [m, dim] to [n, dim] in the order of all experts."""
        return all_to_all(rows.index_select(0, record.order.argsort()), self.group, record.sent, record.received)


def apply_expert_parallel(model: nn.Module, ep_mesh: DeviceMesh | None, etp_mesh: DeviceMesh | None) -> None:
    """Give each rank of `ep_mesh` its part of every stack of experts, and each rank of `etp_mesh` its part of every
    expert's hidden features; in place. Raises LayoutError for sizes that the degrees do not divide."""
    for name, module in model.named_modules():
        experts: Any = getattr(module, "experts", None)
        if getattr(experts, "role", None) != "experts":
            continue
        if ep_mesh is not None:
            if experts.n_experts % ep_mesh.size():
                raise LayoutError(f"ep = {ep_mesh.size()} does not divide the {experts.n_experts} experts of {name}")
            module.ep = ExpertParallel(Group.of(ep_mesh))
        if etp_mesh is not None:
            if experts.w1.shape[1] % etp_mesh.size():
                raise LayoutError(
                    f"etp = {etp_mesh.size()} does not divide the {experts.w1.shape[1]} hidden features of {name}"
                )
            module.etp = Group.of(etp_mesh)
        _split(experts, ep_mesh, etp_mesh)


def _split(experts: nn.Module, ep_mesh: DeviceMesh | None, etp_mesh: DeviceMesh | None) -> None:
    meshes = [mesh for mesh in (ep_mesh, etp_mesh) if mesh is not None]
    mesh = concatenated(meshes)
    for name, hidden in (("w1", 1), ("w2", 2), ("w3", 1)):
        placements: list[Placement] = [] if ep_mesh is None else [Shard(0)]
        if etp_mesh is not None:
            placements.append(Shard(hidden))
        whole = getattr(experts, name)
        part = shard(whole.detach(), mesh, tuple(placements))
        setattr(experts, name, nn.Parameter(part, requires_grad=whole.requires_grad))
