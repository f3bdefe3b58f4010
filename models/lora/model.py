"""LoRA in a model: add, name, disable, initialize and merge."""

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

from archon.models.layers.linear import Embedding
from archon.models.layers.moe import GroupedExperts
from archon.models.lora.dora import row_norms, scale_rows
from archon.models.lora.dropout import LoRADropout, hash_text
from archon.models.lora.layers import LoRALayer, MultiLoRALayer
from archon.models.lora.targets import LoRASize
from archon.parallel.fsdp import local_region, local_tensor
from archon.parallel.gather import full_tensors
from archon.schema.errors import ConfigError

Fill = tuple[str, Callable[[Tensor], Any]]
"""A parameter's name, and its in-place initializer."""


def add_lora(model: nn.Module, sizes: Mapping[str, LoRASize], dtype: torch.dtype, lora_name: str | None = None) -> None:
    """Freeze a model on the meta device and add LoRAs to its matrices, in `dtype`.

    A critic's value head stays trainable and changes to `dtype`. A LoRA with a name becomes one of several.

    Raises:
        ConfigError: a module cannot have this name.
    """
    if lora_name is not None and hasattr(MultiLoRALayer(), lora_name):
        raise ConfigError(f"a LoRA cannot be named {lora_name!r}, which PyTorch's modules use; choose another name")
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
        if module is None:  # belongs to another pipeline stage
            continue
        if isinstance(module, GroupedExperts):
            experts, out_features, in_features = getattr(module, matrix).shape
            lora = LoRALayer(in_features, out_features, size.rank, size.scale, experts).to(dtype)
            module.lora = module.lora or nn.ModuleDict()
            module.lora[matrix] = _with_name(dict(module.lora).get(matrix), lora, lora_name)
        else:
            out_features, in_features = module.weight.shape
            lora = LoRALayer(in_features, out_features, size.rank, size.scale, dora=size.dora).to(dtype)
            if lora.magnitude is not None:
                lora.magnitude.to(torch.promote_types(dtype, torch.float32))
            if size.dropout and not isinstance(module, Embedding):  # a lookup has no input features, as in PEFT
                lora.dropout = LoRADropout(size.dropout, hash_text(name))
            module.lora = _with_name(module.lora, lora, lora_name)


def _with_name(present: nn.Module | None, lora: LoRALayer, lora_name: str | None) -> LoRALayer | MultiLoRALayer:
    if lora_name is None:
        return lora
    several = present if isinstance(present, MultiLoRALayer) else MultiLoRALayer()
    several[lora_name] = lora
    return several


def add_lora_like(model: nn.Module, like: nn.Module) -> None:
    """Add the LoRAs of `like`, a model with the same layers, on the meta device."""
    for name, module in like.named_modules():
        lora = getattr(module, "lora", None)
        if lora is not None:
            model.get_submodule(name).lora = copy.deepcopy(lora).to("meta")


def share_frozen(model: nn.Module, owner: nn.Module) -> None:
    """Replace frozen parameters of `model` by equal ones of `owner`, before the first forward.

    Equal means the same name, shape, dtype, device and sharding.
    """
    frozen = {name: parameter for name, parameter in owner.named_parameters() if not parameter.requires_grad}
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            source = frozen.get(f"{module_name}.{name}" if module_name else name)
            if source is not None and not parameter.requires_grad and _kind(parameter) == _kind(source):
                setattr(module, name, source)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    placed = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return type(tensor), tensor.shape, tensor.dtype, tensor.device, placed


@contextmanager
def disable_lora(model: nn.Module) -> Iterator[None]:
    """Disable all LoRAs within the block, so that the model computes its frozen weights alone."""
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
    """Yield the initializers of a LoRA's parameters, as in PEFT; see `LoRASpec.init`."""
    for prefix, module in model.named_modules():
        if isinstance(module, LoRALayer) and (lora_name is None or prefix.endswith(f".{lora_name}")):
            if prefix.startswith("tok_embeddings."):
                yield f"{prefix}.a", nn.init.normal_
            else:
                normal = partial(nn.init.normal_, std=1 / module.a.shape[-2])
                yield f"{prefix}.a", normal if kind == "gaussian" else _uniform
            yield f"{prefix}.b", _uniform if kind == "random" else nn.init.zeros_


@torch.no_grad()
def initialize_magnitudes(model: nn.Module, dtype: torch.dtype) -> None:
    """Set DoRA magnitudes to the norms of their rows, so that training starts at W + scale * b a. A collective.

    Args:
        model: the model, or pipeline stages, with weights and LoRAs.
        dtype: dtype of the computation.

    Raises:
        ConfigError: a row is zero.
    """
    for name, module in model.named_modules():
        lora = getattr(module, "lora", None)
        if not isinstance(lora, LoRALayer) or lora.magnitude is None:
            continue
        parts = {"weight": module.weight, "a": lora.a, "b": lora.b}
        weight, a, b = (x.to(dtype) for _, x in full_tensors(parts.items()))
        norms, magnitude = row_norms(weight, a, b, lora.scale), lora.magnitude.weight
        if float(norms.min()) == 0:
            raise ConfigError(
                f"lora.dora divides by the norms of rows, and row {int(norms.argmin())} of {name}.weight is zero; "
                "leave this matrix out of targets, or set dora to false"
            )
        local_tensor(magnitude).copy_(norms[local_region(magnitude)])


@torch.no_grad()
def fix_norms(model: nn.Module) -> None:
    """Compute the row norms of DoRA, for weights that do not change until the next call."""
    for module in model.modules():
        lora = getattr(module, "lora", None)
        if not isinstance(lora, LoRALayer) or lora.magnitude is None:
            continue
        weight: Tensor = module.weight  # type: ignore[assignment]
        norms = row_norms(weight, *lora.parts(weight.dtype), lora.scale)
        if lora.fixed_norms is None:
            lora.fixed_norms = norms
        else:
            lora.fixed_norms.copy_(norms)  # captured CUDA graphs read this memory


def _uniform(x: Tensor) -> Tensor:
    """Fill a weight, or a stack, as PyTorch fills a linear layer: uniform within 1 / sqrt(in)."""
    bound = 1 / math.sqrt(x.shape[-1])
    return nn.init.uniform_(x, -bound, bound)


def is_lora(name: str) -> bool:
    """Return whether a parameter of this name belongs to a LoRA."""
    return ".lora." in name


def lora_parameter_names(matrix: str, lora_name: str | None = None) -> tuple[str, str]:
    """Return the names of a and b for a matrix; `lora_name` selects one of several LoRAs."""
    owner, _, last = matrix.rpartition(".")
    prefix = f"{owner}.lora" if last == "weight" else f"{owner}.lora.{last}"
    if lora_name is not None:
        prefix = f"{prefix}.{lora_name}"
    return f"{prefix}.a", f"{prefix}.b"


def magnitude_name(matrix: str) -> str:
    """Return the name of the magnitudes of a matrix with DoRA."""
    return f"{matrix.removesuffix('.weight')}.lora.magnitude.weight"


def single_lora_names(sizes: Mapping[str, LoRASize], lora_name: str | None) -> dict[str, str]:
    """Map the names of a LoRA's tensors in a multi-LoRA model to their names in a single-LoRA model."""
    names = {
        name: single
        for matrix in sizes
        for name, single in zip(lora_parameter_names(matrix, lora_name), lora_parameter_names(matrix), strict=True)
    }
    magnitudes = (magnitude_name(matrix) for matrix, size in sizes.items() if size.dora)  # never of several LoRAs
    return names | {name: name for name in magnitudes}


def merge_lora_weights(
    weights: Iterable[tuple[str, Tensor]], lora_weights: Mapping[str, Tensor], sizes: Mapping[str, LoRASize]
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole weights with their LoRAs merged, in the weights' dtypes.

    `lora_weights` holds whole tensors by name; `sizes` are by the name of the matrix.
    """
    for name, weight in weights:
        if name in sizes:
            a, b = (lora_weights[part] for part in lora_parameter_names(name))
            magnitude = lora_weights[magnitude_name(name)] if sizes[name].dora else None
            weight = merged(weight, a, b, sizes[name].scale, weight.dtype, magnitude)
        yield name, weight


def merged(
    weight: Tensor, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype, magnitude: Tensor | None = None
) -> Tensor:
    """Return weight + scale * b a in `dtype`, of a matrix or a stack, with rows of the norms `magnitude` if any.

    The sum is computed in at least float32 and rounded once.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    a, b = (x.to(weight.device, wide) for x in (a, b))
    whole = weight.to(wide) + scale * (b @ a)
    return (whole if magnitude is None else scale_rows(whole, magnitude)).to(dtype)
