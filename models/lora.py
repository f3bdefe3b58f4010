"""Which matrices of a model get a low-rank adapter, of which rank, and how they get it."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from archon.models.layers.linear import Linear
from archon.models.layers.lora import LowRank
from archon.models.layers.moe import GroupedExperts
from archon.models.state_dict import BaseStateDictAdapter
from archon.schema.config import LoRAConfig
from archon.schema.errors import ConfigError

Fill = tuple[str, Callable[[Tensor], Any]]
"""A parameter's name, and what fills it in place with its first values."""
ADAPTED_ROLES = ("column", "row", "latent")
"""Roles of the linear layers that may have adapters: not routers, embeddings and heads."""
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


def adapter_sizes(adapter: BaseStateDictAdapter, config: LoRAConfig) -> dict[str, AdapterSize]:
    """Returns the adapters that `config` wants, by the native name of their matrix, in the model's order.

    Targets and patterns are names of Hugging Face's modules, such as q_proj or layers.3.mlp.down_proj, as in PEFT: one
    means every module whose name is it, or ends with a dot and it. Raises ConfigError for a target that matches none,
    and for a rank that is larger than the matrix.
    """
    modules = {name: hf_modules(adapter, name) for name in adaptable(adapter)}
    targets = [config.targets] if isinstance(config.targets, str) else config.targets
    everything = targets == ["all-linear"]
    for target in [] if everything else targets:
        if not any(_ends_with(module, target) for names in modules.values() for module in names):
            leaves = sorted({module.rpartition(".")[2] for names in modules.values() for module in names})
            raise ConfigError(
                f"lora.targets has {target!r}, which is none of this model's linear layers; expected all-linear, or "
                f"names of {', '.join(leaves)}"
            )
    sizes = {
        name: AdapterSize(
            int(_by_pattern(config.rank_pattern, names, config.rank)),
            float(_by_pattern(config.alpha_pattern, names, config.alpha)),
            config.rslora,
        )
        for name, names in modules.items()
        if everything or any(_ends_with(module, target) for module in names for target in targets)
    }
    for name, size in sizes.items():
        if size.rank > max(adapter.native_shapes[name][-2:]):
            raise ConfigError(
                f"lora: the adapter of {modules[name][0]!r} has rank {size.rank}, more than its matrix has rows and "
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


def _ends_with(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")


def _by_pattern(pattern: Mapping[str, float], modules: Iterable[str], default: float) -> float:
    """Returns the value of the first pattern that a module's name ends with, as PEFT does."""
    for key, value in pattern.items():
        if any(matches(key, module) for module in modules):
            return value
    return default


def matches(pattern: str, module: str) -> bool:
    """Returns whether a key of PEFT's rank_pattern, a regular expression, means a module: the end of its name."""
    return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None


def add_adapters(model: nn.Module, sizes: Mapping[str, AdapterSize], dtype: torch.dtype) -> None:
    """Freeze a model on the meta device and add the adapters of the matrices that it has, in `dtype`."""
    model.requires_grad_(False)
    modules = dict(model.named_modules())
    for name, size in sizes.items():
        owner, _, matrix = name.rpartition(".")
        module: Any = modules.get(owner)
        if module is None:  # of another stage of the pipeline
            continue
        if isinstance(module, GroupedExperts):
            experts, out_features, in_features = getattr(module, matrix).shape
            adapter = LowRank(in_features, out_features, size.rank, size.scale, experts)
            module.lora = module.lora or nn.ModuleDict()
            module.lora[matrix] = adapter.to(dtype)
        else:
            module.lora = LowRank(module.in_features, module.out_features, size.rank, size.scale).to(dtype)


def mirror_adapters(model: nn.Module, like: nn.Module) -> None:
    """Add the adapters that `like`, of the same layers, has; on the meta device."""
    for name, module in like.named_modules():
        adapter = getattr(module, "lora", None)
        if adapter is not None:
            model.get_submodule(name).lora = copy.deepcopy(adapter).to("meta")


def initializers(model: nn.Module, kind: Literal["zero", "gaussian", "random"]) -> Iterator[Fill]:
    """Yields what gives the adapters' parameters their first values, as PEFT does; see `LoRAConfig.init`."""
    for prefix, module in model.named_modules():
        if isinstance(module, LowRank):
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


def adapter_names(matrix: str) -> tuple[str, str]:
    """Returns the names of a and b of a matrix's adapter."""
    owner, _, last = matrix.rpartition(".")
    prefix = f"{owner}.lora" if last == "weight" else f"{owner}.lora.{last}"
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
