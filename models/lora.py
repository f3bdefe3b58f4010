"""Which matrices of a model get a low-rank adapter, of which rank, and how they get it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from archon.models.layers.linear import Linear
from archon.models.layers.lora import LowRank, LowRanks
from archon.models.layers.moe import GroupedExperts
from archon.models.state_dict import BaseStateDictAdapter
from archon.schema.config import AdapterShape
from archon.schema.errors import ConfigError
from archon.schema.name_patterns import NamePatterns, ends_of

Fill = tuple[str, Callable[[Tensor], Any]]
"""A parameter's name, and what fills it in place with its first values."""
ADAPTED_ROLES = ("column", "row", "latent")
"""Roles of the linear layers that may have adapters: not routers, embeddings and heads."""
Value = TypeVar("Value")
EXPERT_MATRICES = ("w1", "w2", "w3")


@dataclass(frozen=True)
class AdapterSize:
    """The rank of an adapter, and alpha, which its scale is made of."""

    rank: int
    alpha: float
    rslora: bool

    @property
    def scale(self) -> float:
        """Alpha / rank, or alpha / sqrt(rank) with rslora (Kalajdzievski 2023, arXiv:2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def adapter_sizes(adapter: BaseStateDictAdapter, config: AdapterShape) -> dict[str, AdapterSize]:
    """Returns the adapters that `config` wants, by the native name of their matrix, in the model's order.

    Targets and patterns are names of Hugging Face's modules, such as q_proj or layers.3.mlp.down_proj, as in PEFT: one
    means every module whose name is it, or ends with a dot and it. Experts have the names of the checkpoint's modules,
    and those of the parameters that stack them. Raises ConfigError for a target that matches none, for names of some
    experts of a layer, and for a rank that is larger than the matrix.
    """
    modules = {name: _spellings(adapter, name) for name in adaptable(adapter)}
    targets = [config.targets] if isinstance(config.targets, str) else config.targets
    everything = targets == ["all-linear"]
    wanted = {*modules} if everything else set()
    for target in [] if everything else targets:
        named = {name for name, spellings in modules.items() if _means(target, spellings)}
        if not named:
            known = {module for spellings in modules.values() for names in spellings for module in names}
            leaves = sorted({module.rpartition(".")[2] for module in known})
            raise ConfigError(
                f"lora.targets has {target!r}, which is none of this model's linear layers; expected all-linear, or "
                f"names of {', '.join(leaves)}"
            )
        wanted |= named
    ranks, alphas = NamePatterns(config.rank_pattern), NamePatterns(config.alpha_pattern)
    sizes = {
        name: AdapterSize(
            int(_by_pattern("rank_pattern", ranks, spellings, config.rank)),
            float(_by_pattern("alpha_pattern", alphas, spellings, config.alpha)),
            config.rslora,
        )
        for name, spellings in modules.items()
        if name in wanted
    }
    for name, size in sizes.items():
        if size.rank > max(adapter.native_shapes[name][-2:]):
            raise ConfigError(
                f"lora: the adapter of {modules[name][0][0]!r} has rank {size.rank}, more than its matrix has rows and "
                f"columns, {adapter.native_shapes[name][-2:]}; choose a smaller rank, for it alone by rank_pattern"
            )
    return sizes


def adaptable(adapter: BaseStateDictAdapter) -> list[str]:
    """Returns the native names of the matrices that can have an adapter, in the model's order."""
    with torch.device("meta"):
        model = adapter.model_class(adapter.args)
    names = []
    for prefix, module in model.named_modules():
        if isinstance(module, Linear) and module.role in ADAPTED_ROLES:
            names.append(f"{prefix}.weight")
        elif isinstance(module, GroupedExperts):
            names += [f"{prefix}.{matrix}" for matrix in EXPERT_MATRICES]
    return names


def hf_modules(adapter: BaseStateDictAdapter, name: str) -> list[str]:
    """Returns the names of Hugging Face's modules that hold a matrix; one for each expert of stacked ones."""
    return [hf.removesuffix(".weight") for hf in adapter.hf_names(name)]


def _spellings(adapter: BaseStateDictAdapter, name: str) -> list[list[str]]:
    """Returns the names of a matrix's modules in checkpoints, and in transformers' model, which stacks experts."""
    return [hf_modules(adapter, name), hf_modules(adapter.in_memory, name)]


def _means(target: str, spellings: Iterable[list[str]]) -> bool:
    return any(
        _same_of_all("targets", modules, [target in ends_of(module) for module in modules]) for modules in spellings
    )


def _by_pattern(
    field: str, patterns: NamePatterns[int] | NamePatterns[float], spellings: Iterable[list[str]], default: float
) -> float:
    """Returns the value of the first pattern that means a matrix's modules."""
    for modules in spellings:
        value = _same_of_all(field, modules, [patterns.first(module, 0) for module in modules])
        if value:
            return value
    return default


def _same_of_all(field: str, modules: Sequence[str], values: Sequence[Value]) -> Value:
    """Returns the value that all modules of a matrix have. Raises ConfigError where some experts have another."""
    for module, value in zip(modules, values, strict=True):
        if value != values[0]:
            raise ConfigError(
                f"lora.{field} differs between {modules[0]!r} and {module!r}, and the experts of a layer have adapters "
                "of one size, or none; name all of them"
            )
    return values[0]


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


def parameter_count(shape: Sequence[int], size: AdapterSize) -> int:
    """Returns the parameters of the adapter of a matrix of this shape, or of a stack of them."""
    return math.prod(shape[:-2]) * size.rank * (shape[-2] + shape[-1])


def active_parameters(adapter: BaseStateDictAdapter, sizes: Mapping[str, AdapterSize]) -> int:
    """Returns how many parameters of adapters a token uses: of stacks of experts those of the chosen ones."""
    active = 0
    for name, size in sizes.items():
        *experts, rows, columns = adapter.native_shapes[name]
        chosen = adapter.args.layer_specs[int(name.split(".")[1])].feed_forward.n_active_experts if experts else 1
        active += chosen * parameter_count((rows, columns), size)
    return active


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


def with_adapters(
    weights: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor], sizes: Mapping[str, AdapterSize]
) -> Iterator[tuple[str, Tensor]]:
    """Yields whole weights with their adapters added, in the weights' dtypes; sums are computed in at least float32.

    Args:
        weights: (name, whole tensor) of the frozen model.
        adapters: whole tensors of the adapters, by name.
        sizes: by the name of the matrix.
    """
    for name, weight in weights:
        if name not in sizes:
            yield name, weight
            continue
        wide = torch.promote_types(weight.dtype, torch.float32)
        a, b = (adapters[part].to(weight.device, wide) for part in adapter_names(name))
        yield name, (weight.to(wide) + sizes[name].scale * (b @ a)).to(weight.dtype)
