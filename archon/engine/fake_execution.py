"""Execution on fake tensors: floats have only shapes, integers and results of collectives have values.

Values that the code *reads* are real or assumed:

- integers and booleans are real tensors, and so are floats made from them: token ids, labels, token indices;
- all ranks are assumed to hold equal tensors: an all-gather of a real tensor repeats it, a sum multiplies it;
- routers choose experts round robin, so every expert receives equally many tokens;
- a number read from a fake tensor (the gradient norm, a metric) is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from archon.models.layers.moe import Router
from archon.parallel.collectives import CollectiveRecorder, collective_group, collective_kind
from archon.parallel.torch_private import (
    FakeTensor,
    fused_adamw,
    grouped_mm,
    local_scalar_dense,
    unset_fake_temporarily,
)

aten = torch.ops.aten


def round_robin(router: Router, args: Any, output: Any) -> Any:
    """Choose expert (t k + j) mod E as the j-th of token t's k experts."""
    weights, experts, stats = output
    choices = torch.arange(experts.numel()).view(experts.shape) % router.gate.weight.shape[0]
    return weights, choices, stats


_MESSAGE = b"{}"
"""Message received by a control plane: the empty metrics of another stage."""


class FakeExecution(CollectiveRecorder):
    """Dispatch mode below FakeTensorMode that runs operators of real tensors and counts collectives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is fused_adamw:
            return None  # no communication; flattening its thousands of arguments takes longer than the whole step
        if DTensor in types:
            return NotImplemented  # dispatched again with its local tensors
        self.record(func, args)
        flat = (x for arg in (*args, *kwargs.values()) for x in (arg if isinstance(arg, (list, tuple)) else (arg,)))
        tensors = [x for x in flat if isinstance(x, Tensor)]
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if func is local_scalar_dense:
                return 1.0 if args[0].is_floating_point() else 1
            if func is grouped_mm:
                return _grouped_shape(*args, **kwargs)
            return func(*args, **kwargs)
        if not tensors and not _is_real(func, kwargs):
            return func(*args, **kwargs)
        if any(x.is_meta for x in tensors) and kwargs.get("device", torch.device("meta")).type != "meta":
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            if kind := collective_kind(func.namespace, func.overloadpacket.__name__):
                return _fake_collective(kind, func, args, kwargs)
            return func(*args, **kwargs)


def _is_real(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a factory function makes a real tensor: integers, or on the meta device."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    if device is not None and device.type == "meta":
        return True
    if dtype is None:
        return func.overloadpacket in (aten.arange, aten.scalar_tensor)
    return not dtype.is_floating_point


def _fake_collective(kind: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a collective among ranks with equal tensors."""
    if func.namespace == "c10d":
        result = func(*args, **kwargs)  # sends nothing
        operator = func.overloadpacket.__name__
        if operator == "allgather_":
            for out, x in zip(args[0], args[1], strict=True):
                for part in out:
                    part.copy_(x)
        elif operator == "recv_":
            args[0][0].fill_(1)  # stages exchange whether shapes are known
        elif operator == "broadcast_" and args[0][0].dtype == torch.uint8:
            args[0][0].copy_(torch.tensor(list(_MESSAGE.ljust(args[0][0].numel()))))
        elif operator == "broadcast_" and args[0][0].dim() == 0:
            args[0][0].fill_(len(_MESSAGE))  # a control plane sends it before a message
        return result
    x, size = args[0], collective_group(args).size()
    if kind == "all_reduce":
        return x * size if args[1] == "sum" else x.clone()
    if kind == "all_to_all":
        # Every rank is assumed to send equal parts.
        x = x.split(args[2])[collective_group(args).rank()]
    elif kind != "all_gather":
        raise RuntimeError(f"the result of {func} is unknown: a fake process group sends no values")
    return x.repeat(size, *[1] * (x.dim() - 1))


def _grouped_shape(left: Tensor, right: Tensor, offs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return an empty result of a grouped matmul; torch's shape function supports only bfloat16."""
    if right.dim() == 3:
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(offs.shape[0], left.shape[0], right.shape[1])
