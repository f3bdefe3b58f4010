"""What ranks tell one another beside tensors: texts, and whether a piece of work went well everywhere.

Texts travel as bytes, never pickled. The group is one of its own over the CPU, so that a thread may agree on something
while the training goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from archon.parallel.gloo import use_single_worker_gloo
from archon.schema.errors import CheckpointError

AGREEMENT = "archon agreement"
"""What the descriptions of these groups begin with."""


class Agreement:
    """All ranks of the run, as they agree; one process agrees with itself. Each method is a collective, not to be
    called from two threads at once. It waits up to PyTorch's own half an hour and not `timeout_s`, for one rank may be
    writing a checkpoint meanwhile."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    @classmethod
    def of_world(cls, purpose: str) -> Agreement:
        """The run's, made on the first call with this `purpose`, which every rank must make."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(None)
        return _of_group(dist.distributed_c10d._get_default_group(), purpose)

    def together(self, work: Callable[[], Any]) -> Any:
        """This rank's `work()`, once every rank has done its own. Where it raised on one, it raises on all: there its
        own error, elsewhere a CheckpointError that names the rank."""
        if self.size == 1:
            return work()
        result, error = None, None
        try:
            result = work()
        except Exception as raised:  # noqa: BLE001 - it is raised again once the others know
            error = raised
        failed = self.all_gather(torch.tensor([error is not None]))
        if not failed.any():
            return result
        texts = self._all_texts("" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        rank = int(failed.flatten().int().argmax())
        raise CheckpointError(f"rank {rank} failed: {texts[rank]}")

    def share(self, text: str | None) -> str:
        """Rank 0's text, on every rank."""
        return self._all_texts(text if self.rank == 0 and text is not None else "")[0]

    def collect(self, text: str) -> list[str]:
        """Every rank's text on rank 0, by rank; nothing elsewhere."""
        if self.size == 1:
            return [text]
        own, sizes = self._padded(text)
        parts = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(own, parts, group=self._group, group_dst=0)
        return [_text(part, size) for part, size in zip(parts or [], sizes, strict=parts is not None)]

    def all_gather(self, tensor: Tensor) -> Tensor:
        """CPU tensors of one shape [...] to [ranks, ...]."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._group)
        return torch.stack(parts)

    def _all_texts(self, text: str) -> list[str]:
        own, sizes = self._padded(text)
        return [_text(part, size) for part, size in zip(self.all_gather(own), sizes, strict=True)]

    def _padded(self, text: str) -> tuple[Tensor, list[int]]:
        """The text's bytes, as many as the longest text has, and the length of each rank's."""
        data = text.encode()
        sizes = self.all_gather(torch.tensor([len(data)])).flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
        return padded, sizes


@cache
def _of_group(world: dist.ProcessGroup, purpose: str) -> Agreement:
    use_single_worker_gloo()
    return Agreement(dist.new_group(backend="gloo", group_desc=f"{AGREEMENT} {purpose}"))


def _text(padded: Tensor, size: int) -> str:
    return bytes(padded[:size].numpy()).decode()
