"""What a training step really allocates: the step of `archon.engine.dry_run`, with every storage followed from the
operator that makes it to its release. What the formulas of `archon.planner.memory` are held against.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from archon.engine.dry_run import RankReport, dry_run_config, fake_step, rank_report
from archon.engine.engine import ArchonEngine
from archon.parallel.fsdp import local_tensor
from archon.parallel.torch_dispatch import TorchDispatchMode, tree_leaves, wait_tensor
from archon.schema.config import EngineConfig


@dataclass(frozen=True)
class Block:
    """One allocation: its bytes, the operator that made it, and the shape and dtype that this gave it."""

    bytes: int
    operator: str
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True)
class Trace:
    """The most bytes alive at once between the start of a step and the optimiser's, and what they were made of.

    Masters and moments are not among them, gradients are; `held` are the three, and what the step sent.
    """

    held: RankReport
    peak_bytes: int
    blocks: tuple[Block, ...]


class StorageTracker(TorchDispatchMode):
    """Follows the storages made within it; keeps the state of the moment when they were most bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, Block] = {}
        self.known: dict[int, weakref.ref[Any]] = {}
        self.total = self.peak = 0
        self.at_peak: tuple[Block, ...] = ()
        self.stopped = False
        self._rising = False

    def ignore(self, tensor: Tensor) -> None:
        """Never count this tensor's storage, which was there before."""
        storage = tensor.untyped_storage()
        self.known[storage._cdata] = weakref.ref(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes back with its local tensors
        if func is wait_tensor:
            return args[0]  # as it is in truth; imagined, it would be a copy
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
        self._set(key, Block(storage.nbytes(), operator, tuple(tensor.shape), dtype))

    def _set(self, key: int, block: Block) -> None:
        before = self.live.pop(key, None)
        self._add(block.bytes - (before.bytes if before else 0))
        self.live[key] = block
        if self.total > self.peak:
            self.peak, self._rising = self.total, True

    def _add(self, change: int) -> None:
        # The picture is taken when what was the most so far is about to shrink.
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
        """A storage was given another size, as FSDP does to free gathered weights and to have them again."""
        key = storage._cdata
        if not self.stopped and key in self.live:
            old = self.live[key]
            self._set(key, Block(storage.nbytes(), "resize", old.shape, old.dtype))

    def stop(self) -> None:
        """Count nothing any more."""
        self._add(-self.total)
        self.stopped = True


@contextmanager
def _watched(engine: ArchonEngine, tracker: StorageTracker) -> Iterator[None]:
    for tensor in (*engine.model.parameters(), *engine.model.buffers()):
        tracker.ignore(local_tensor(tensor.detach()))
    assert engine.optimizer is not None
    engine.optimizer.register_step_pre_hook(lambda *_: tracker.stop())
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: Any, size: int) -> Any:
        done = resize(storage, size)
        tracker.resized(storage)
        return done

    with patch.object(torch.UntypedStorage, "resize_", resize_and_tell), tracker:
        yield


def trace(config: EngineConfig, rank: int, tokens: int, micro_batches: int = 1) -> Trace:
    """What rank `rank` of `config.layout` allocates in a step on `micro_batches` of `tokens` each.

    Works in a process of its own, in seconds; takes no memory for weights or activations. Shared prefixes are off.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])  # importing torch takes longer than most steps
    config = config.model_copy(update={"share_prefixes": False})
    with ProcessPoolExecutor(1, mp_context=context) as apart:
        return apart.submit(_trace, dry_run_config(config, tokens), rank, tokens, micro_batches).result()


def _trace(config: EngineConfig, rank: int, tokens: int, micro_batches: int) -> Trace:
    tracker = StorageTracker()
    engine, recorder = fake_step(config, rank, tokens, micro_batches, lambda engine: _watched(engine, tracker))
    return Trace(rank_report(engine, rank, recorder.sums), tracker.peak, tracker.at_peak)
