"""Expert parallelism (GShard: Lepikhin et al. 2020, arXiv:2006.16668).

Each rank holds a part of the experts; all-to-all sends every token to the ranks of its experts and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from archon.parallel.comm import Group, all_to_all
from archon.parallel.tensor import lora_layers, shard_parameter
from archon.parallel.torch_private import concat_meshes
from archon.schema.errors import LayoutError


class DispatchRecord(NamedTuple):
    """Record that `combine` needs to undo `dispatch`: rows sent and received per rank, and the permutation."""

    sent: list[int]
    received: list[int]
    order: Tensor


@dataclass(frozen=True)
class ExpertParallel:
    """All-to-all of token rows to the ranks of their experts; rank r holds the r-th part of the experts."""

    group: Group

    def dispatch(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, DispatchRecord]:
        """Send rows to the ranks of their experts. The host synchronizes once, to read the row counts.

        Args:
            rows: [n, dim], sorted by expert.
            counts: int64 [E], rows of each expert.

        Returns:
            The rows [m, dim] of the local E / size experts sorted by expert, their int64 counts, and the record for
            `combine`.
        """
        size = self.group.size
        by_rank = counts.unflatten(0, (size, -1))
        incoming = all_to_all(by_rank.contiguous(), self.group)
        sent, received = torch.stack((by_rank.sum(1), incoming.sum(1))).tolist()
        rows = all_to_all(rows, self.group, received, sent)
        # Rows arrive by rank and, within a rank, by expert; the experts need them by expert, then by rank.
        lengths = incoming.t().flatten()
        starts = (incoming.flatten().cumsum(0) - incoming.flatten()).unflatten(0, incoming.shape).t().flatten()
        total = rows.shape[0]
        shift = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths, output_size=total)
        order = shift + torch.arange(total, device=rows.device)
        return rows.index_select(0, order), incoming.sum(0), DispatchRecord(sent, received, order)

    def combine(self, rows: Tensor, record: DispatchRecord) -> Tensor:
        """Undo `dispatch` for the experts' outputs: [m, dim] to [n, dim], sorted by expert."""
        return all_to_all(rows.index_select(0, record.order.argsort()), self.group, record.sent, record.received)


def apply_expert_parallel(model: nn.Module, ep_mesh: DeviceMesh | None, etp_mesh: DeviceMesh | None) -> None:
    """Shard every stack of experts over `ep_mesh` and the hidden features of each expert over `etp_mesh`, in place.

    Raises:
        LayoutError: a degree does not divide a size.
    """
    for name, module in model.named_modules():
        experts: Any = getattr(module, "experts", None)
        if getattr(experts, "role", None) != "experts":
            continue
        if ep_mesh is not None:
            if experts.n_experts % ep_mesh.size():
                raise LayoutError(f"ep = {ep_mesh.size()} does not divide the {experts.n_experts} experts of {name}")
            module.ep = ExpertParallel(Group.from_mesh(ep_mesh))
        if etp_mesh is not None:
            module.etp = experts.etp = Group.from_mesh(etp_mesh)
        mesh = concat_meshes([mesh for mesh in (ep_mesh, etp_mesh) if mesh is not None])
        for weight, parameter in [*experts.named_parameters(recurse=False)]:
            placements: list[Placement] = [] if ep_mesh is None else [Shard(0)]
            if etp_mesh is not None:
                # Hidden features are the columns of w2 alone. The bias b2 of its output is split as well, so that each
                # of its features is added by one rank to its term of the sum.
                dim = 2 if weight == "w2" else 1
                if parameter.shape[dim] % etp_mesh.size():
                    features = "output" if weight == "b2" else "hidden"
                    raise LayoutError(
                        f"etp = {etp_mesh.size()} does not divide the {parameter.shape[dim]} {features} features of "
                        f"{name}"
                    )
                placements.append(Shard(dim))
            shard_parameter(experts, weight, mesh, tuple(placements))
        lora = getattr(experts, "lora", None) or {}
        for matrix, lora_layer in [(name, one) for name, layers in lora.items() for one in lora_layers(layers)]:
            # a [E, r, in] is split with the columns of its matrix, b [E, out, r] with its rows.
            split = "a" if matrix == "w2" else "b"
            for part in ("a", "b"):
                placements = [] if ep_mesh is None else [Shard(0)]
                if etp_mesh is not None:
                    placements.append(Replicate() if part != split else Shard(2 if part == "a" else 1))
                shard_parameter(lora_layer, part, mesh, tuple(placements))
