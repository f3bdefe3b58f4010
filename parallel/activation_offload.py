"""Activation offload: the inputs of recomputed blocks wait for the backward pass in host memory.

On CUDA, a side stream copies each input to pinned memory while the next blocks compute, and back while the backward of
the block above runs. The device holds at most `MAX_DEVICE_INPUTS` inputs. On a CPU, the same code copies within its
memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from archon.schema.errors import FamilyError

# Copies to the host that may still run. One hides a copy behind one block, the second absorbs blocks of unequal time.
COPIES_IN_FLIGHT = 2
# In the forward pass these, and the output of a block. In the backward pass two: the input in use, and the next one.
MAX_DEVICE_INPUTS = COPIES_IN_FLIGHT + 1


class HostInput:
    """Block input in host memory.

    Args:
        hidden: the input, on its device.
        below: the input of the block below, which the backward pass needs next; None for the first block.
    """

    def __init__(self, hidden: Tensor, below: HostInput | None) -> None:
        self.device = hidden.device
        # Autograd owns the inputs. A strong reference would keep the whole chain until the last one is freed.
        self.below = None if below is None else weakref.ref(below)
        self.host = torch.empty_like(hidden, device="cpu", pin_memory=hidden.is_cuda)
        self.fetched: Tensor | None = None
        self.copied = copy_async(hidden, self.host)

    def fetch(self) -> None:
        """Start the copy to the device, unless it has been started."""
        if self.fetched is None:
            # Allocated on the computing stream, which also frees it.
            self.fetched = torch.empty_like(self.host, device=self.device)
            self.copied = copy_async(self.host, self.fetched)

    def take(self) -> Tensor:
        """Return the input on its device, and start the copy of the input of the block below."""
        self.fetch()
        wait_for(self.copied)
        hidden, self.fetched = self.fetched, None
        assert hidden is not None
        if self.below is not None and (below := self.below()) is not None:
            below.fetch()
        return hidden


class InputOffload:
    """Offload of the inputs of a stage's blocks."""

    def __init__(self) -> None:
        self._in_flight: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._last: weakref.ref[HostInput] | None = None

    def run(self, call: Callable[..., Any], is_first: bool, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return `call(hidden, …)`; where autograd saves `hidden`, it saves a copy in host memory.

        Raises:
            FamilyError: the call saves tensors for its backward pass, and its input is not one of them.
        """
        below = None if is_first or self._last is None else self._last()
        hooks = _Hooks(self, hidden, below)
        with saved_tensors_hooks(hooks.pack, hooks.unpack):
            out = call(hidden, *args, **kwargs)
        hooks.hidden = None  # autograd keeps the hooks
        if hooks.on_host is not None:
            self._last = hooks.on_host
        elif hooks.kept:
            raise FamilyError(
                f"a block saved {hooks.kept} tensors for its backward pass, and its input is not one of them; "
                "activation_checkpoint.mode = offload expects to find the input; set the mode to full"
            )
        return out

    def to_host(self, hidden: Tensor, below: HostInput | None) -> HostInput:
        """Start the copy of an input to host memory."""
        saved = HostInput(hidden, below)
        if saved.copied is not None:
            # The computing stream frees the tensor, so it first waits for the copy.
            self._in_flight.append((hidden, saved.copied))
            if len(self._in_flight) > COPIES_IN_FLIGHT:
                wait_for(self._in_flight.popleft()[1])
        return saved

    def to_device(self, saved: HostInput) -> Tensor:
        """Return an input on its device."""
        hidden = saved.take()
        # The first copy back has waited for all copies to the host: they are on one stream.
        self._in_flight.clear()
        return hidden


class _Hooks:
    """Hooks of one call for autograd's saved tensors."""

    def __init__(self, offload: InputOffload, hidden: Tensor, below: HostInput | None) -> None:
        self.offload, self.below = offload, None if below is None else weakref.ref(below)
        self.hidden: Tensor | None = hidden
        self.on_host: weakref.ref[HostInput] | None = None
        self.kept = 0

    def pack(self, saved: Tensor) -> Tensor | HostInput:
        hidden = self.hidden
        assert hidden is not None
        if saved.untyped_storage() is not hidden.untyped_storage() or saved.shape != hidden.shape:
            self.kept += 1
            return saved
        on_host = None if self.on_host is None else self.on_host()
        if on_host is None:  # all uses of the input share one copy
            on_host = self.offload.to_host(hidden.detach(), None if self.below is None else self.below())
            self.on_host = weakref.ref(on_host)
        return on_host

    def unpack(self, saved: Tensor | HostInput) -> Tensor:
        return saved if isinstance(saved, Tensor) else self.offload.to_device(saved)


@cache
def offloading_class(block_class: Any) -> Any:
    """Return a subclass whose calls go through the block's `input_offload`, outside of the compiled forward."""

    def call(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        run = partial(block_class.__call__, self)
        if not torch.is_grad_enabled():
            return run(hidden, *args, **kwargs)
        return self.input_offload.run(run, self.is_first_offloaded, hidden, *args, **kwargs)

    return type(f"Offloading{block_class.__name__}", (block_class,), {"__call__": call})


def copy_async(source: Tensor, target: Tensor) -> torch.cuda.Event | None:
    """Copy after the work that the current stream holds; return an event of the copy's end, None on a CPU."""
    device = source.device if source.is_cuda else target.device
    if device.type != "cuda":
        target.copy_(source)
        return None
    side = _copy_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(side)
    return copied


def wait_for(copied: torch.cuda.Event | None) -> None:
    """Make the current stream wait for a copy; the host goes on."""
    if copied is not None:
        torch.cuda.current_stream().wait_event(copied)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
