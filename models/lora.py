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

from archon.models.layers.lora import LowRank, LowRanks
from archon.models.layers.moe import GroupedExperts
from archon.models.lora_targets import AdapterSize
from archon.schema.errors import ConfigError

Fill = tuple[str, Callable[[Tensor], Any]]
"""A parameter's name, and what fills it in place with its first values."""


def add_adapters(
    model: nn.Module, sizes: Mapping[str, AdapterSize], dtype: torch.dtype, named: str | None = None
) -> None:
    """Freeze a model on the meta device and add an adapter of the matrices that it has, in `dtype`.

    A critic's value head is not frozen, and is in `dtype` too. An adapter with a name may be one of several. Raises
    ConfigError for a name that a module cannot have.
    """
    if named is not None and hasattr(LowRanks(), named):
        raise ConfigError(f"an adapter cannot be named {named!r}, which PyTorch's modules use; choose another name")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
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
            adapter = LowRank(in_features, out_features, size.rank, size.scale, experts).to(dtype)
            module.lora = module.lora or nn.ModuleDict()
            module.lora[matrix] = _joined(dict(module.lora).get(matrix), adapter, named)
        else:
            adapter = LowRank(module.in_features, module.out_features, size.rank, size.scale).to(dtype)
            module.lora = _joined(module.lora, adapter, named)


def _joined(others: nn.Module | None, adapter: LowRank, named: str | None) -> LowRank | LowRanks:
    if named is None:
        return adapter
    several = others if isinstance(others, LowRanks) else LowRanks()
    several[named] = adapter
    return several


def mirror_adapters(model: nn.Module, like: nn.Module) -> None:
    """Add the adapters that `like`, of the same layers, has; on the meta device."""
    for name, module in like.named_modules():
        adapter = getattr(module, "lora", None)
        if adapter is not None:
            model.get_submodule(name).lora = copy.deepcopy(adapter).to("meta")


def share_frozen(model: nn.Module, owner: nn.Module) -> None:
    """Make frozen parameters of `model` those of `owner` with the same name, shape and dtype, also where both are
    sharded alike; before the first forward."""
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
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Makes the model compute what its frozen weights alone do, until the end of the block."""
    adapters = [module for module in model.modules() if isinstance(module, LowRank | LowRanks)]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


def initializers(
    model: nn.Module, kind: Literal["zero", "gaussian", "random"], named: str | None = None
) -> Iterator[Fill]:
    """Yields what gives an adapter's parameters their first values, as PEFT does; see `AdapterShape.init`."""
    for prefix, module in model.named_modules():
        if isinstance(module, LowRank) and (named is None or prefix.endswith(f".{named}")):
            normal = partial(nn.init.normal_, std=1 / module.a.shape[-2])
            yield f"{prefix}.a", normal if kind == "gaussian" else _uniform
            yield f"{prefix}.b", _uniform if kind == "random" else nn.init.zeros_


def _uniform(x: Tensor) -> Tensor:
    """Fill a weight, or a stack of them, as PyTorch fills a linear layer's: uniform within 1 / sqrt(in)."""
    bound = 1 / math.sqrt(x.shape[-1])
    return nn.init.uniform_(x, -bound, bound)


def is_adapter(name: str) -> bool:
    """Returns whether a parameter of this name belongs to an adapter."""
    return ".lora." in name


def adapter_names(matrix: str, named: str | None = None) -> tuple[str, str]:
    """Returns the names of a and b of a matrix's adapter, which has a name where there are several."""
    owner, _, last = matrix.rpartition(".")
    prefix = f"{owner}.lora" if last == "weight" else f"{owner}.lora.{last}"
    if named is not None:
        prefix = f"{prefix}.{named}"
    return f"{prefix}.a", f"{prefix}.b"


def names_alone(matrices: Iterable[str], named: str | None) -> dict[str, str]:
    """Returns the names of an adapter's tensors, each with the one that it has where the adapter is the only one."""
    return {
        name: alone
        for matrix in matrices
        for name, alone in zip(adapter_names(matrix, named), adapter_names(matrix), strict=True)
    }


def with_adapters(
    weights: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor], sizes: Mapping[str, AdapterSize]
) -> Iterator[tuple[str, Tensor]]:
    """Yields whole weights with their adapters merged, in the weights' dtypes.

    Args:
        weights: (name, whole tensor) of the frozen model.
        adapters: whole tensors of the adapters, by name.
        sizes: by the name of the matrix.
    """
    for name, weight in weights:
        if name in sizes:
            a, b = (adapters[part] for part in adapter_names(name))
            weight = merged(weight, a, b, sizes[name].scale, weight.dtype)
        yield name, weight


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Returns weight + scale * b a in `dtype`, of a matrix or of a stack of them.

    The sum is computed in at least float32, and rounded once.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    a, b = (x.to(weight.device, wide) for x in (a, b))
    return (weight.to(wide) + scale * (b @ a)).to(dtype)
