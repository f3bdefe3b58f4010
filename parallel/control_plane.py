"""Control plane: ranks exchange numbers and text, and learn whether work succeeded on every rank.

Data is sent as bytes, never pickled. Each purpose has a separate CPU group, so a thread can write a checkpoint together
with the other ranks while training continues.
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
from archon.parallel.mesh import default_group
from archon.parallel.torch_private import time_limit
from archon.schema.errors import CheckpointError, ConfigError

LONG_TIMEOUT_PREFIX = "archon control plane, patient: "
"""Description prefix of groups that `timeout_s` does not limit."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class ControlPlane:
    """Collectives for numbers and text; with one process they return at once.

    Every method is a collective: all ranks call the methods in the same order, from one thread. Another thread needs
    another control plane.
    """

    rank: int = 0
    size: int = 1
    connect: Callable[[], dist.ProcessGroup] = default_group
    device: torch.device = CPU

    @classmethod
    def world(cls) -> ControlPlane:
        """Return the control plane of all processes for the main thread's work within a step."""
        return cls._create("run", long_timeout=False)

    @classmethod
    def with_long_timeout(cls, purpose: str) -> ControlPlane:
        """Return a control plane for long waits, for example while one rank writes a file or finishes a rollout.

        Its time limit is PyTorch's default of 30 minutes, or `timeout_s` if that is longer.
        """
        return cls._create(purpose, long_timeout=True)

    @classmethod
    def _create(cls, purpose: str, long_timeout: bool) -> ControlPlane:
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        return cls(dist.get_rank(), dist.get_world_size(), partial(_cpu_group, default_group(), purpose, long_timeout))

    @classmethod
    def from_group(cls, group: Group, device: torch.device) -> ControlPlane:
        """Return the plane of an existing group; its data goes through `device`."""
        return cls(group.rank, group.size, lambda: group.process_group, device)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's files and prints for it. Not a collective."""
        return self.rank == 0

    def run_on_all(self, work: Callable[[], Any]) -> Any:
        """Run `work` on every rank and return the local result once all ranks are done.

        Raises:
            CheckpointError: another rank raised; the message names it. The rank that failed raises its original error.
        """
        if self.size == 1:
            return work()
        result, error = None, None
        try:
            result = work()
        except Exception as raised:  # noqa: BLE001 - raised again after the other ranks know
            error = raised
        texts = self.all_gather(b"" if error is None else f"{type(error).__name__}: {error}".encode())
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text:
                raise CheckpointError(f"rank {rank} failed: {text.decode()}")
        return result

    def broadcast_json(self, value: Callable[[], Any], source: int = 0) -> Any:
        """Return on every rank the result of `value`, which only rank `source` calls; it must be JSON."""
        if self.size == 1:
            return value()
        return json.loads(self.broadcast(lambda: json.dumps(value()).encode(), source))

    def broadcast(self, data: Callable[[], bytes], source: int = 0) -> bytes:
        """Return on every rank the bytes of `data`, which only rank `source` calls."""
        payload = data() if self.rank == source else b""
        if self.size == 1:
            return payload
        size = torch.tensor(len(payload), device=self.device)
        group = self.connect()
        dist.broadcast(size, group=group, group_src=source)
        content = _tensor(payload, max(1, int(size)), self.device)
        dist.broadcast(content, group=group, group_src=source)
        return _bytes(content[: int(size)])

    def gather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order, on rank 0; an empty list elsewhere."""
        if self.size == 1:
            return [data]
        padded, sizes = self._padded(data)
        parts = [torch.empty_like(padded) for _ in range(self.size)] if self.is_main else None
        dist.gather(padded, parts, group=self.connect(), group_dst=0)
        return [_bytes(part[:size]) for part, size in zip(parts or [], sizes, strict=parts is not None)]

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order."""
        if self.size == 1:
            return [data]
        padded, sizes = self._padded(data)
        return [_bytes(part[:size]) for part, size in zip(self.all_gather_tensor(padded), sizes, strict=True)]

    def all_gather_tensor(self, tensor: Tensor) -> Tensor:
        """Gather tensors of one shape [...] on the plane's device to [ranks, ...]."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.connect())
        return torch.stack(parts)

    def all_reduce_max(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        if self.size == 1:
            return number
        value = torch.tensor(number, device=self.device)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.connect())
        return int(value)

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        self.all_reduce_max(0)

    def require_same(self, what: str, value: str) -> None:
        """Raise ConfigError on every rank if a rank has another `value` than rank 0."""
        everyone = [data.decode() for data in self.all_gather(value.encode())]
        for rank, rank_value in enumerate(everyone):
            if rank_value != everyone[0]:
                raise ConfigError(
                    f"{what}: rank {rank} has {rank_value}, rank 0 has {everyone[0]}; every machine "
                    "needs the same files"
                )

    def main_first(self, action: Callable[[], None]) -> None:
        """Run `action` on rank 0 while the others wait."""
        self.broadcast_json(action)

    def _padded(self, data: bytes) -> tuple[Tensor, list[int]]:
        """Return the bytes padded to the longest of all ranks, and the byte count of every rank."""
        sizes = self.all_gather_tensor(torch.tensor([len(data)], device=self.device)).flatten().tolist()
        return _tensor(data, max(1, *sizes), self.device), sizes


@cache
def _cpu_group(world: dist.ProcessGroup, purpose: str, long_timeout: bool) -> dist.ProcessGroup:
    """Return the group of a purpose. The first call creates it, and is a collective."""
    use_single_worker_gloo()
    limit = time_limit(world)
    if long_timeout:
        limit = max(limit, dist.default_pg_timeout)
    description = f"{LONG_TIMEOUT_PREFIX if long_timeout else 'archon control plane: '}{purpose}"
    return dist.new_group(backend="gloo", timeout=limit, group_desc=description)


def _tensor(data: bytes, size: int, device: torch.device) -> Tensor:
    """Return the bytes as uint8 [size], cut or padded with zeros."""
    return torch.frombuffer(bytearray(data[:size].ljust(size, b"\0")), dtype=torch.uint8).to(device)


def _bytes(content: Tensor) -> bytes:
    return content.cpu().numpy().tobytes()
