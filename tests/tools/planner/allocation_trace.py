"""Traces every allocation of a training step run by `archon.engine.dry_run`, from its operator to its release."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from archon.engine.dry_run import RankReport, dry_run_config, fake_step, rank_report
from archon.engine.engine import ArchonEngine
from archon.engine.forkserver import forkserver_context
from archon.parallel.fsdp import local_tensor
from archon.parallel.torch_private import TorchDispatchMode, tree_leaves, wait_tensor
from archon.schema.config import EngineConfig


@dataclass(frozen=True)
class Allocation:
    """One allocation: its bytes, the operator that made it, and the shape and dtype of the operator's result."""

    bytes: int
    operator: str
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True)
class AllocationTrace:
    """The peak of allocated bytes between the start of a step and its optimizer step.

    The peak includes gradients, but not masters and moments. `held` has the bytes of all three, and the collectives.
    """

    held: RankReport
    peak_bytes: int
    allocations: tuple[Allocation, ...]


class StorageTracker(TorchDispatchMode):
    """Tracks the storages that are allocated while it is active, and which of them were alive at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, Allocation] = {}
        self.known: dict[int, weakref.ref[Any]] = {}
        self.total = self.peak = 0
        self.at_peak: tuple[Allocation, ...] = ()
        self.stopped = False
        self._rising = False

    def ignore(self, tensor: Tensor) -> None:
        """Do not count this tensor's storage, which was allocated before."""
        storage = tensor.untyped_storage()
        self.known[storage._cdata] = weakref.ref(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor then dispatches again, with its local tensors
        if func is wait_tensor:
            return args[0]  # the fake implementation would return a copy; the real one does not
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta" and not isinstance(leaf, DTensor):
                self._note(leaf, func._opname)
        return out

    def _note(self, tensor: Tensor, operator: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if self.stopped or key in self.known:
            return
        self.known[key] = weakref.ref(storage, lambda _: self._free(key))
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._set(key, Allocation(storage.nbytes(), operator, tuple(tensor.shape), dtype))

    def _set(self, key: int, block: Allocation) -> None:
        before = self.live.pop(key, None)
        self._add(block.bytes - (before.bytes if before else 0))
        self.live[key] = block
        if self.total > self.peak:
            self.peak, self._rising = self.total, True

    def _add(self, change: int) -> None:
        # The live allocations are copied only when the total is about to drop from a new peak.
        if change < 0 and self._rising:
            self.at_peak, self._rising = tuple(self.live.values()), False
        self.total += change

    def _free(self, key: int) -> None:
        self.known.pop(key, None)
        block = self.live.get(key)
        if block is not None:
            self._add(-block.bytes)
            del self.live[key]

    def resized(self, storage: Any) -> None:
        """Note that a storage was resized, as FSDP does to free gathered weights and to allocate them again."""
        key = storage._cdata
        if not self.stopped and key in self.live:
            old = self.live[key]
            self._set(key, Allocation(storage.nbytes(), "resize", old.shape, old.dtype))

    def stop(self) -> None:
        """Stop counting."""
        self._add(-self.total)
        self.stopped = True


@contextmanager
def _watched(engine: ArchonEngine, tracker: StorageTracker) -> Iterator[None]:
    for tensor in (*engine.model.parameters(), *engine.model.buffers()):
        tracker.ignore(local_tensor(tensor.detach()))
    assert engine.optimizer is not None
    engine.optimizer.register_step_pre_hook(lambda *_: tracker.stop())
    resize = torch.UntypedStorage.resize_

    def resize_and_note(storage: Any, size: int) -> Any:
        done = resize(storage, size)
        tracker.resized(storage)
        return done

    with patch.object(torch.UntypedStorage, "resize_", resize_and_note), tracker:
        yield


def trace_allocations(config: EngineConfig, rank: int, tokens: int, micro_batches: int = 1) -> AllocationTrace:
    """Return the allocations of rank `rank` of `config.layout` in a step on `micro_batches` of `tokens` tokens each.

    Runs in a process of its own, in seconds, on fake tensors without memory. Shared prefixes are off.
    """
    config = config.model_copy(update={"share_prefixes": False})
    with ProcessPoolExecutor(1, forkserver_context()) as pool:
        return pool.submit(_trace, dry_run_config(config, tokens), rank, tokens, micro_batches).result()


def _trace(config: EngineConfig, rank: int, tokens: int, micro_batches: int) -> AllocationTrace:
    tracker = StorageTracker()
    engine, recorder = fake_step(config, rank, tokens, micro_batches, lambda engine: _watched(engine, tracker))
    return AllocationTrace(rank_report(engine, rank, recorder.sums), tracker.peak, tracker.at_peak)
