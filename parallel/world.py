"""All processes of a run together: which of them writes, and what they tell one another."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from archon.schema.errors import ConfigError


@dataclass(frozen=True)
class World:
    """The processes of the default group. Every method but the properties is called by all of them, in one order."""

    rank: int = 0
    size: int = 1

    @classmethod
    def now(cls) -> World:
        """The processes that have joined; this one alone where none have."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's files and speaks for it."""
        return self.rank == 0

    def most(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        if self.size == 1:
            return number
        value = torch.tensor(number)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return int(value)

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank, on every rank."""
        if self.size == 1:
            return [data]
        sizes = [torch.zeros((), dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor(len(data)))
        longest = max(1, *(int(size) for size in sizes))
        own = torch.zeros(longest, dtype=torch.uint8)
        own[: len(data)] = _tensor(data)
        everyone = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(everyone, own)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(everyone, sizes, strict=True)]

    def tell(self, value: Callable[[], Any]) -> Any:
        """What `value`, called on the main rank alone, gives: JSON, on every rank."""
        if self.size == 1:
            return value()
        data = json.dumps(value()).encode() if self.is_main else b""
        size = torch.tensor(len(data))
        dist.broadcast(size, 0)
        content = _tensor(data) if self.is_main else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(content, 0)
        return json.loads(content.numpy().tobytes())

    def require_same(self, what: str, value: str) -> None:
        """ConfigError, on every rank, where a rank's `value` is not the main rank's."""
        everyone = [data.decode() for data in self.gather(value.encode())]
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise ConfigError(
                    f"{what}: rank {rank} has {other}, rank 0 has {everyone[0]}; every machine needs the same files"
                )

    def main_first(self, action: Callable[[], None]) -> None:
        """Do something on the main rank; the others wait until it is done."""
        self.tell(action)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
