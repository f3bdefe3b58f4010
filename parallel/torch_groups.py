"""What archon asks of process groups that PyTorch keeps private: which there are, by name, and how long they wait."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from archon.parallel.torch_parts import require_parts

PARTS = (
    "torch.distributed.distributed_c10d._world.pg_map",
    "torch.distributed.distributed_c10d._get_default_group",
    "torch.distributed.distributed_c10d._resolve_process_group",
    "torch.distributed.ProcessGroup._device_types",
    "torch.distributed.ProcessGroup._get_backend",
)
require_parts("process groups", PARTS)


def default_group() -> dist.ProcessGroup:
    """The group of all processes, which has been joined."""
    return dist.distributed_c10d._get_default_group()


def group_by_name(name: str) -> dist.ProcessGroup:
    """The group that functional collectives know by `name`."""
    return dist.distributed_c10d._resolve_process_group(cast(Any, name))


def all_groups() -> list[dist.ProcessGroup]:
    """Every group that this process has joined and not left."""
    return list(dist.distributed_c10d._world.pg_map)


def set_time_limit(group: dist.ProcessGroup, limit: timedelta) -> None:
    """Let no later collective of the group take longer, on any device."""
    for backend in _backends(group):
        if hasattr(backend, "_set_default_timeout"):  # a fake group waits for nobody
            backend._set_default_timeout(limit)


def time_limit(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of the group may take on the CPU; PyTorch's own limit for a group that does not tell."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    return getattr(options, "_timeout", dist.default_pg_timeout)


def _backends(group: dist.ProcessGroup) -> Iterator[Any]:
    for device in group._device_types:
        yield group._get_backend(device)
