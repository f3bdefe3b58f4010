"""Mixed precision on one process: float32 masters, and copies in the compute dtype while a block runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import register_multi_grad_hook

from archon.parallel.torch_private import foreach_copy_, put_weight, replace_class, tree_leaves


def apply_mixed_precision(
    model: nn.Module,
    layers: nn.ModuleDict,
    dtype: torch.dtype,
    *,
    free_blocks: bool,
    free_root: bool,
    mtp_layers: nn.ModuleDict | None = None,
) -> None:
    """Compute a model in `dtype`, with gradients in the dtype of its parameters, the masters.

    Units are the blocks, the vision encoder, and the remaining modules, as with FSDP. A unit copies its weights before
    its forward pass, and again before its backward pass if the copies were freed: one kernel copies all weights. One
    more kernel casts the gradients to the dtype of the masters. Modules with `full_precision` compute with the masters.

    Args:
        model: the model, with an optional vision encoder in `visual`.
        layers: the blocks; torch.compile compiles only what they do with the copies.
        dtype: dtype of the computation.
        free_blocks: free the copies of blocks and of the vision encoder between forward and backward.
        free_root: free the copies of the remaining modules between forward and backward.
        mtp_layers: the layers of multi-token prediction, further units.
    """
    vision_encoder = getattr(model, "visual", None)
    units = [*layers.values(), *(mtp_layers or {}).values(), *([] if vision_encoder is None else [vision_encoder])]
    wide = {p for module in model.modules() if getattr(module, "full_precision", False) for p in module.parameters()}
    inside = {id(module) for unit in units for module in unit.modules()}
    remaining = [module for module in model.modules() if id(module) not in inside]
    for unit, modules, frees in [
        *((unit, unit.modules(), free_blocks) for unit in units),
        (model, remaining, free_root),
    ]:
        # A tied parameter is in several places.
        places = [
            (module, name)
            for module in modules
            for name, parameter in module.named_parameters(recurse=False)
            if parameter not in wide and parameter.dtype != dtype
        ]
        if places:
            unit.weight_copies = _UnitWeights(places, dtype, frees)
            replace_class(unit, _copying_class(type(unit)))  # type: ignore[arg-type]


def has_mixed_precision(model: nn.Module) -> bool:
    """Return whether modules of the model compute with copies of their weights."""
    return any(hasattr(module, "weight_copies") for module in model.modules())


@cache
def _copying_class(unit_class: Any) -> Any:
    """Return a subclass that runs the calls of `unit_class` with copies of the weights."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.weight_copies.run(partial(unit_class.__call__, self), args, kwargs)

    return type(f"MixedPrecision{unit_class.__name__}", (unit_class,), {"__call__": call})


class _UnitWeights:
    """The weights of a unit, which are copies while the unit runs and masters otherwise."""

    def __init__(self, places: list[tuple[nn.Module, str]], dtype: torch.dtype, frees: bool) -> None:
        self._places = places
        self._dtype = dtype
        self._frees = frees

    def run(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run `call` with copies in the place of the masters."""
        masters = {(module, name): module.get_parameter(name) for module, name in self._places}
        copies = _Copies(masters)
        tensors = _Cast.apply(copies, self._dtype, *copies.masters)
        copies.show(tensors)
        try:
            out = call(*args, **kwargs)
        finally:
            copies.show(copies.masters)
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
        if outputs and any(x.requires_grad for x in tensors):
            copies.tensors = [x.data.requires_grad_(x.requires_grad) for x in tensors]
            if self._frees:
                copies.free()
            register_multi_grad_hook(outputs, lambda grad: copies.restore(), mode="any")
        return out


class _Copies:
    """Copies of the masters of a unit for one forward and backward pass.

    Args:
        places: the master at each module and name.
    """

    def __init__(self, places: dict[tuple[nn.Module, str], nn.Parameter]) -> None:
        self.masters: list[Tensor] = list(dict.fromkeys(places.values()))
        # Tensors with the memory of the copies. Writing to them is no change to what autograd saved.
        self.tensors: list[Tensor] = []
        self._places = places
        self._is_freed = False

    def show(self, tensors: Sequence[Tensor]) -> None:
        """Put a tensor in the place of each master."""
        tensor_of = dict(zip(self.masters, tensors, strict=True))
        for (module, name), master in self._places.items():
            put_weight(module, name, tensor_of[master])

    def free(self) -> None:
        """Free the memory of the copies. Autograd keeps the tensors, and `restore` allocates their memory again."""
        for tensor in self.tensors:
            tensor.untyped_storage().resize_(0)
        self._is_freed = True

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the masters again if the copies were freed, and show the copies, which recomputation reads."""
        if self._is_freed:
            for tensor in self.tensors:
                tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
            foreach_copy_(self.tensors, self.masters)
            self._is_freed = False
        self.show(self.tensors)


class _Cast(torch.autograd.Function):
    """Copies of masters in another dtype, and gradients in the dtype of the masters."""

    @staticmethod
    def forward(ctx: Any, copies: _Copies, dtype: torch.dtype, *masters: Tensor) -> tuple[Tensor, ...]:
        """Return the copies; copies of frozen masters have no gradient."""
        tensors = [torch.empty_like(master, dtype=dtype) for master in masters]
        foreach_copy_(tensors, masters)
        ctx.copies = copies
        ctx.mark_non_differentiable(*(x for x, m in zip(tensors, masters, strict=True) if not m.requires_grad))
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the masters. The unit's backward pass ends here, so its copies are freed."""
        copies: _Copies = ctx.copies
        copies.show(copies.masters)
        copies.free()
        wide = [None if x is None else torch.empty_like(m) for m, x in zip(copies.masters, grads, strict=True)]
        if any(x is not None for x in grads):
            foreach_copy_([x for x in wide if x is not None], [x for x in grads if x is not None])
        return (None, None, *wide)
