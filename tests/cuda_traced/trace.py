"""Runs code for CUDA on a machine without a GPU: operators of tensors on `cuda` are given the shapes, dtypes and
devices of their results, by PyTorch's fake tensors, and compute nothing. Tensors on the CPU are real, so that the host
reads its own numbers; what it reads from the device is 1.

An error is what a GPU would refuse, or would make the host wait for:

- tensors of both devices in one operator, but for scalars on the CPU; indices on the CPU, which CUDA would copy;
- a number or a shape that only the device knows, and a copy from memory that is not pinned, for which the host waits
  until all kernels before it have run; unless `HOST_WAITS` names the function that does so;
- operands that a kernel of attention or of grouped products does not take, which the fake ones do not check.

Backward needs a device: PyTorch runs it in a thread of the device's own.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from archon.parallel.torch_private import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    tree_leaves,
    unset_fake_temporarily,
)
from tests.cuda_traced.host_waits import HOST_WAITS
from tests.cuda_traced.kernels import check_operands

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
PROPERTIES = SimpleNamespace(total_memory=80 << 30)
# Operators whose results have shapes, or that are numbers, which only the device knows.
READS = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2, aten.unique_consecutive,
    aten.bincount, aten.repeat_interleave,
}  # fmt: skip


class MixedDevicesError(AssertionError):
    """An operator has tensors on the device and on the CPU."""


class HostWaitError(AssertionError):
    """The host would wait for the device, in a function that `HOST_WAITS` does not name."""


class CudaTrace(TorchDispatchMode):
    """What runs on the device while the trace is on.

    Attributes:
        operators: how often each operator ran on tensors on the device.
        waits: how often each function waited, by its full name.
        launches: how often an operator launched a kernel: neither a view nor an allocation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(x.__module__.startswith("torchao.") for x in types):
            return NotImplemented  # dispatched again with the tensors inside
        if func.namespace == "aten" and func._can_decompose():  # as inference mode leaves it to
            with self:
                return func.decompose(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        target = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if not any(x.is_cuda for x in tensors):
            return self._from_host(func, args, kwargs, tensors, target)
        self.operators[str(func)] += 1
        self.launches += launches_kernel(func)
        if func.overloadpacket is aten.copy_ and args[1].device.type == "cpu":
            if not _is_async(func, args, kwargs):
                self.wait(f"{func} from memory of the host")
        elif any(x.device.type == "cpu" and x.dim() for x in tensors):
            raise MixedDevicesError(f"{func} in {caller()} has tensors on the device and on the CPU")
        if target is not None and target.type == "cpu":
            if not kwargs.get("non_blocking"):
                self.wait(f"{func} to the host")
            with unset_fake_temporarily():
                return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func.overloadpacket in READS and kwargs.get("output_size") is None:
            self.wait(str(func))
            return _read(func, args)
        check_operands(func, args, kwargs)
        return func(*args, **kwargs)

    def _from_host(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], target: torch.device | None) -> Any:
        """Run an operator without operands on the device: for real, unless the result is on the device."""
        if func is aten._pin_memory.default:
            return args[0]
        if target is not None and target.type == "cuda":
            if any(x.device.type == "cpu" for x in tensors) and not _is_async(func, args, kwargs):
                self.wait(f"{func} from memory of the host")
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def wait(self, what: str) -> None:
        """Count a wait of the function that runs. Raises HostWaitError unless `HOST_WAITS` names it."""
        where = caller()
        if where not in HOST_WAITS:
            raise HostWaitError(f"the host waits for the device in {where}: {what}")
        self.waits[where] += 1


def _is_async(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a copy to the device is one that the host does not wait for."""
    if func.overloadpacket is aten.copy_:
        return bool(args[2:3] and args[2]) or bool(kwargs.get("non_blocking"))
    return func is not aten._to_copy.default or bool(kwargs.get("non_blocking"))


def launches_kernel(func: Any) -> bool:
    """Return whether an operator launches a kernel: a view has the memory of its operand, `empty` writes nothing."""
    if func.namespace in ("prim", "profiler") or "empty" in func.name() or func.overloadpacket is aten._unsafe_view:
        return False
    return not any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)


def _read(func: Any, args: Any) -> Any:
    """Return what a function of `HOST_WAITS` is told: 1, or that there is nothing."""
    if func is aten._local_scalar_dense.default:
        return 1.0 if args[0].is_floating_point() else 1
    if func is aten.nonzero.default:
        return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
    raise HostWaitError(f"{func} in {caller()}: its result has no shape here")


def caller() -> str:
    """Return the full name of the function of archon that runs, that of a method with its class."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("archon."):
            return f"{name}.{frame.f_code.co_qualname.split('.<locals>')[0]}"
        frame = frame.f_back  # type: ignore[assignment]
    return "no function of archon"


def _tolist(trace: CudaTrace) -> Any:
    real = FakeTensor.tolist

    def tolist(self: Tensor) -> Any:
        if not self.is_cuda:
            return real(self)
        trace.wait("tolist")
        with unset_fake_temporarily():
            return torch.ones(self.shape, dtype=self.dtype).tolist()

    return tolist


@contextmanager
def cuda_trace() -> Iterator[CudaTrace]:
    """Trace what runs inside."""
    trace = CudaTrace()
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(trace)
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", _tolist(trace)))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", return_value=PROPERTIES))
        yield trace


def run_backward(out: Tensor, grad: Tensor, inputs: Sequence[Tensor] = ()) -> dict[Tensor, Tensor]:
    """Run the backward pass of a result in this thread, node by node. Returns the gradients of the leaves.

    PyTorch's engine would run it in a thread of the device.
    """
    ends = {x.grad_fn: x for x in inputs if x.grad_fn is not None}
    nodes, seen, stack = [], set(), [(out.grad_fn, False)]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            nodes.append(node)
        elif node is not None and node not in seen:
            seen.add(node)
            stack.append((node, True))
            if node not in ends:
                stack += ((before, False) for before, _ in node.next_functions)
    pending: dict[Any, dict[int, Tensor]] = {out.grad_fn: {out.output_nr: grad}}
    leaves = {}
    for node in reversed(nodes):
        grads = pending.pop(node, None)
        if grads is None:
            continue
        if node in ends:
            leaves[ends[node]] = grads[ends[node].output_nr]
            continue
        if hasattr(node, "variable"):
            leaves[node.variable] = grads[0]
            continue
        results = getattr(node, "apply", node)(*(grads.get(i) for i in range(len(node._input_metadata))))
        results = results if isinstance(results, tuple) else (results,)
        for (before, index), result in zip(node.next_functions, results, strict=False):
            if before is not None and result is not None:
                result = _fit(result, before._input_metadata[index])
                slots = pending.setdefault(before, {})
                slots[index] = slots[index] + result if index in slots else result
    return leaves


def _fit(grad: Tensor, metadata: Any) -> Tensor:
    """Return a gradient in the shape and dtype of its tensor, as PyTorch's engine does between two nodes."""
    return grad.sum_to_size(metadata.shape).to(metadata.dtype)


def require_on_cuda(result: Any) -> None:
    """Raise AssertionError for a tensor of a result that is not on the device."""
    for x in tree_leaves(result):
        if isinstance(x, Tensor):
            assert x.device == CUDA, f"a result of shape {tuple(x.shape)} is on {x.device}"
