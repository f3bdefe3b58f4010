"""The control plane: what ranks tell one another beside tensors of the model, and whether work went well everywhere.

Numbers and texts travel as bytes, never pickled. The groups are of their own and over the CPU, one for each purpose, so
that a thread may write a checkpoint with the other ranks while the training goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from archon.parallel.comm import Group
from archon.parallel.gloo import use_single_worker_gloo
from archon.parallel.torch_groups import default_group, time_limit
from archon.schema.errors import CheckpointError, ConfigError

PATIENT = "archon control plane, patient: "
"""What the descriptions of the groups begin with that `timeout_s` does not limit."""

CPU = torch.device("cpu")


def _no_group() -> dist.ProcessGroup:
    raise AssertionError("one process alone has no group")


@dataclass(frozen=True)
class ControlPlane:
    """Ranks that talk to one another; one process agrees with itself.

    Every method is a collective: all ranks call it, in one order, and never from two threads at once; a thread of its
    own has a plane of its own.
    """

    rank: int = 0
    size: int = 1
    connect: Callable[[], dist.ProcessGroup] = _no_group
    device: torch.device = CPU

    @classmethod
    def of_run(cls) -> ControlPlane:
        """All processes of the run, as they go from step to step; the main thread's."""
        return cls._of_world("run", patient=False)

    @classmethod
    def patient(cls, purpose: str) -> ControlPlane:
        """All processes of the run, where one may write a file or finish a rollout while the others wait: `timeout_s`
        does not count, but only PyTorch's own half an hour, or `timeout_s` where that is longer."""
        return cls._of_world(purpose, patient=True)

    @classmethod
    def _of_world(cls, purpose: str, patient: bool) -> ControlPlane:
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        return cls(dist.get_rank(), dist.get_world_size(), partial(_cpu_group, default_group(), purpose, patient))

    @classmethod
    def of_group(cls, group: Group, device: torch.device) -> ControlPlane:
        """The ranks of a group that exists already; what they say goes through `device`."""
        return cls(group.rank, group.size, lambda: group.process_group, device)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's files and speaks for it. Not a collective."""
        return self.rank == 0

    def run_on_all(self, work: Callable[[], Any]) -> Any:
        """Returns what this rank's `work()` gives, once every rank has done its own.

        Where it raises on one rank, it raises on all: there its own error, elsewhere a CheckpointError that names the
        rank.
        """
        if self.size == 1:
            return work()
        result, error = None, None
        try:
            result = work()
        except Exception as raised:  # noqa: BLE001 - it is raised again once the others know
            error = raised
        failed = self.all_gather_tensor(torch.tensor([error is not None], device=self.device))
        if not failed.any():
            return result
        texts = self.all_gather(b"" if error is None else f"{type(error).__name__}: {error}".encode())
        if error is not None:
            raise error
        rank = int(failed.flatten().int().argmax())
        raise CheckpointError(f"rank {rank} failed: {texts[rank].decode()}")

    def broadcast_json(self, value: Callable[[], Any], source: int = 0) -> Any:
        """Returns what `value`, called on rank `source` alone, gives there, on every rank; it must be JSON."""
        if self.size == 1:
            return value()
        data = json.dumps(value() if self.rank == source else None).encode()
        size = torch.tensor(len(data), device=self.device)
        group = self.connect()
        dist.broadcast(size, group=group, group_src=source)
        content = _tensor(data, self.device)
        if self.rank != source:
            content = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        dist.broadcast(content, group=group, group_src=source)
        return json.loads(_bytes(content))

    def gather(self, data: bytes) -> list[bytes]:
        """Returns every rank's bytes, by rank, on rank 0; an empty list elsewhere."""
        if self.size == 1:
            return [data]
        own, sizes = self._padded(data)
        parts = [torch.empty_like(own) for _ in range(self.size)] if self.is_main else None
        dist.gather(own, parts, group=self.connect(), group_dst=0)
        return [_bytes(part[:size]) for part, size in zip(parts or [], sizes, strict=parts is not None)]

    def all_gather(self, data: bytes) -> list[bytes]:
        """Returns every rank's bytes, by rank, on every rank."""
        if self.size == 1:
            return [data]
        own, sizes = self._padded(data)
        return [_bytes(part[:size]) for part, size in zip(self.all_gather_tensor(own), sizes, strict=True)]

    def all_gather_tensor(self, tensor: Tensor) -> Tensor:
        """Tensors of one shape [...] on the plane's device to [ranks, ...]."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.connect())
        return torch.stack(parts)

    def all_reduce_max(self, number: int) -> int:
        """Returns the largest of the ranks' numbers, once every rank has given its own."""
        if self.size == 1:
            return number
        value = torch.tensor(number, device=self.device)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.connect())
        return int(value)

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        self.all_reduce_max(0)

    def require_same(self, what: str, value: str) -> None:
        """Raises ConfigError, on every rank, where a rank's `value` is not rank 0's."""
        everyone = [data.decode() for data in self.all_gather(value.encode())]
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise ConfigError(
                    f"{what}: rank {rank} has {other}, rank 0 has {everyone[0]}; every machine needs the same files"
                )

    def main_first(self, action: Callable[[], None]) -> None:
        """Do something on rank 0 alone; the others wait until it is done."""
        self.broadcast_json(action)

    def _padded(self, data: bytes) -> tuple[Tensor, list[int]]:
        """The bytes, padded to as many as the longest rank has, and how many each rank has."""
        sizes = self.all_gather_tensor(torch.tensor([len(data)], device=self.device)).flatten().tolist()
        padded = torch.zeros(max(1, *sizes), dtype=torch.uint8, device=self.device)
        padded[: len(data)] = _tensor(data, self.device)
        return padded, sizes


@cache
def _cpu_group(world: dist.ProcessGroup, purpose: str, patient: bool) -> dist.ProcessGroup:
    """The group of a purpose, made on the first call, which all ranks make."""
    use_single_worker_gloo()
    limit = time_limit(world)
    if patient:
        limit = max(limit, dist.default_pg_timeout)
    description = f"{PATIENT if patient else 'archon control plane: '}{purpose}"
    return dist.new_group(backend="gloo", timeout=limit, group_desc=description)


def _tensor(data: bytes, device: torch.device) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _bytes(content: Tensor) -> bytes:
    return content.cpu().numpy().tobytes()
