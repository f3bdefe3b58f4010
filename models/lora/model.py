"""Low-rank adapters of a model's matrices: how they are added, named, switched off and merged."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from archon.models.layers.moe import GroupedExperts
from archon.models.lora.layers import LoRALayer, MultiLoRALayer
from archon.models.lora.targets import LoRASize
from archon.schema.errors import ConfigError

Fill = tuple[str, Callable[[Tensor], Any]]
"""A parameter's name, and what fills it in place with its first values."""


def add_lora(model: nn.Module, sizes: Mapping[str, LoRASize], dtype: torch.dtype, lora_name: str | None = None) -> None:
    """Freeze a model on the meta device and add an adapter of the matrices that it has, in `dtype`.

    A critic's value head is not frozen, and is in `dtype` too. An adapter with a name may be one of several. Raises
    ConfigError for a name that a module cannot have.
    """
    if lora_name is not None and hasattr(MultiLoRALayer(), lora_name):
        raise ConfigError(f"an adapter cannot be named {lora_name!r}, which PyTorch's modules use; choose another name")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_lora(name))
    head = getattr(model, "score", None)
    if head is not None:
        head.to(dtype).requires_grad_(True)
        head.casts_parameters = True
    modules = dict(model.named_modules())
    for name, size in sizes.items():
        owner, _, matrix = name.rpartition(".")
        module: Any = modules.get(owner)
        if module is None:  # of another stage of the pipeline
            continue
        if isinstance(module, GroupedExperts):
            experts, out_features, in_features = getattr(module, matrix).shape
            lora = LoRALayer(in_features, out_features, size.rank, size.scale, experts).to(dtype)
            module.lora = module.lora or nn.ModuleDict()
            module.lora[matrix] = _with_name(dict(module.lora).get(matrix), lora, lora_name)
        else:
            lora = LoRALayer(module.in_features, module.out_features, size.rank, size.scale).to(dtype)
            module.lora = _with_name(module.lora, lora, lora_name)


def _with_name(others: nn.Module | None, lora: LoRALayer, lora_name: str | None) -> LoRALayer | MultiLoRALayer:
    if lora_name is None:
        return lora
    several = others if isinstance(others, MultiLoRALayer) else MultiLoRALayer()
    several[lora_name] = lora
    return several


def add_lora_like(model: nn.Module, like: nn.Module) -> None:
    """Add the adapters that `like`, of the same layers, has; on the meta device."""
    for name, module in like.named_modules():
        lora = getattr(module, "lora", None)
        if lora is not None:
            model.get_submodule(name).lora = copy.deepcopy(lora).to("meta")


def share_frozen(model: nn.Module, owner: nn.Module) -> None:
    """Make frozen parameters of `model` those of `owner` with the same name, shape and dtype, also where both are
    sharded alike; before the first forward.
    """
    theirs = {name: parameter for name, parameter in owner.named_parameters() if not parameter.requires_grad}
    for module_name, module in model.named_modules():
        for name, own in list(module.named_parameters(recurse=False)):
            other = theirs.get(f"{module_name}.{name}" if module_name else name)
            if other is None or own.requires_grad or _kind(own) != _kind(other):
                continue
            setattr(module, name, other)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    placed = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, placed


@contextmanager
def disable_lora(model: nn.Module) -> Iterator[None]:
    """Make the model compute what its frozen weights alone do, until the end of the block."""
    loras = [module for module in model.modules() if isinstance(module, LoRALayer | MultiLoRALayer)]
    for lora in loras:
        lora.enabled = False
    try:
        yield
    finally:
        for lora in loras:
            lora.enabled = True


def initializers(
    model: nn.Module, kind: Literal["zero", "gaussian", "random"], lora_name: str | None = None
) -> Iterator[Fill]:
    """Yield what gives an adapter's parameters their first values, as PEFT does; see `LoRASpec.init`."""
    for prefix, module in model.named_modules():
        if isinstance(module, LoRALayer) and (lora_name is None or prefix.endswith(f".{lora_name}")):
            normal = partial(nn.init.normal_, std=1 / module.a.shape[-2])
            yield f"{prefix}.a", normal if kind == "gaussian" else _uniform
            yield f"{prefix}.b", _uniform if kind == "random" else nn.init.zeros_


def _uniform(x: Tensor) -> Tensor:
    """Fill a weight, or a stack of them, as PyTorch fills a linear layer's: uniform within 1 / sqrt(in)."""
    bound = 1 / math.sqrt(x.shape[-1])
    return nn.init.uniform_(x, -bound, bound)


def is_lora(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    return ".lora." in name


def lora_parameter_names(matrix: str, lora_name: str | None = None) -> tuple[str, str]:
    """Return the names of a and b of a matrix's adapter, which has a name where there are several."""
    owner, _, last = matrix.rpartition(".")
    prefix = f"{owner}.lora" if last == "weight" else f"{owner}.lora.{last}"
    if lora_name is not None:
        prefix = f"{prefix}.{lora_name}"
    return f"{prefix}.a", f"{prefix}.b"


def single_lora_names(matrices: Iterable[str], lora_name: str | None) -> dict[str, str]:
    """Return the names of an adapter's tensors, each with the one that it has where the adapter is the only one."""
    return {
        name: alone
        for matrix in matrices
        for name, alone in zip(lora_parameter_names(matrix, lora_name), lora_parameter_names(matrix), strict=True)
    }


def merge_lora_weights(
    weights: Iterable[tuple[str, Tensor]], lora_weights: Mapping[str, Tensor], sizes: Mapping[str, LoRASize]
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole weights with their adapters merged, in the weights' dtypes.

    Args:
        weights: (name, whole tensor) of the frozen model.
        lora_weights: whole tensors of the adapters, by name.
        sizes: by the name of the matrix.
    """
    for name, weight in weights:
        if name in sizes:
            a, b = (lora_weights[part] for part in lora_parameter_names(name))
            weight = merged(weight, a, b, sizes[name].scale, weight.dtype)
        yield name, weight


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return weight + scale * b a in `dtype`, of a matrix or of a stack of them.

    The sum is computed in at least float32, and rounded once.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    a, b = (x.to(weight.device, wide) for x in (a, b))
    return (weight.to(wide) + scale * (b @ a)).to(dtype)
