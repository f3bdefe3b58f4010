"""Which matrices of a model get a low-rank adapter, and of which size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.layers.linear import Linear
from archon.models.layers.moe import GroupedExperts
from archon.schema.config import LoRASpec
from archon.schema.errors import ConfigError
from archon.schema.name_patterns import NamePatterns, name_suffixes

LORA_ROLES = ("column", "row", "latent", "vision")
"""Roles of the linear layers that may have adapters: not routers, embeddings and heads."""
VISION_PREFIX = "visual."
"""What the native names of a vision tower's matrices begin with; they have adapters only where they are named."""
EXPERT_MATRICES = ("w1", "w2", "w3")
Value = TypeVar("Value")


@dataclass(frozen=True)
class LoRASize:
    """The rank of an adapter, and alpha, which its scale is made of."""

    rank: int
    alpha: float
    rslora: bool

    @property
    def scale(self) -> float:
        """Alpha / rank, or alpha / sqrt(rank) with rslora (Kalajdzievski 2023, arXiv:2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def resolve_lora_sizes(adapter: BaseStateDictAdapter, config: LoRASpec) -> dict[str, LoRASize]:
    """Return the adapters that `config` wants, by the native name of their matrix, in the model's order.

    Targets and patterns are names of Hugging Face's modules, such as q_proj or layers.3.mlp.down_proj, as in PEFT: one
    means every module whose name is it, or ends with a dot and it. Experts have the names of the checkpoint's modules,
    and those of the parameters that stack them. Raises ConfigError for a target that matches none, for names of some
    experts of a layer, and for a rank that is larger than the matrix.
    """
    modules = {name: _module_names(adapter, name) for name in lora_matrices(adapter)}
    targets = [config.targets] if isinstance(config.targets, str) else config.targets
    everything = targets == ["all-linear"]
    wanted = {name for name in modules if everything and not name.startswith(VISION_PREFIX)}
    for target in [] if everything else targets:
        named = {name for name, spellings in modules.items() if _matches(target, spellings)}
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
        name: LoRASize(
            int(_pattern_value("rank_pattern", ranks, spellings, config.rank)),
            float(_pattern_value("alpha_pattern", alphas, spellings, config.alpha)),
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


def lora_matrices(adapter: BaseStateDictAdapter) -> list[str]:
    """Return the native names of the matrices that can have an adapter, in the model's order."""
    with torch.device("meta"):
        model = adapter.model_class(adapter.args)
    names = []
    for prefix, module in model.named_modules():
        if isinstance(module, Linear) and module.role in LORA_ROLES:
            names.append(f"{prefix}.weight")
        elif isinstance(module, GroupedExperts):
            names += [f"{prefix}.{matrix}" for matrix in EXPERT_MATRICES]
    return names


def hf_modules(adapter: BaseStateDictAdapter, name: str) -> list[str]:
    """Return the names of Hugging Face's modules that hold a matrix; one for each expert of stacked ones."""
    return [hf.removesuffix(".weight") for hf in adapter.hf_names(name)]


def _module_names(adapter: BaseStateDictAdapter, name: str) -> list[list[str]]:
    """Return the names of a matrix's modules in checkpoints, and in transformers' model, which stacks experts."""
    return [hf_modules(adapter, name), hf_modules(adapter.in_memory, name)]


def _matches(target: str, spellings: Iterable[list[str]]) -> bool:
    return any(
        _common_value("targets", modules, [target in name_suffixes(module) for module in modules])
        for modules in spellings
    )


def _pattern_value(
    field: str, patterns: NamePatterns[int] | NamePatterns[float], spellings: Iterable[list[str]], default: float
) -> float:
    """Return the value of the first pattern that means a matrix's modules."""
    for modules in spellings:
        value = _common_value(field, modules, [patterns.first(module, 0) for module in modules])
        if value:
            return value
    return default


def _common_value(field: str, modules: Sequence[str], values: Sequence[Value]) -> Value:
    """Return the value that all modules of a matrix have. Raises ConfigError where some experts have another."""
    for module, value in zip(modules, values, strict=True):
        if value != values[0]:
            raise ConfigError(
                f"lora.{field} differs between {modules[0]!r} and {module!r}, and the experts of a layer have adapters "
                "of one size, or none; name all of them"
            )
    return values[0]


def parameter_count(shape: Sequence[int], size: LoRASize) -> int:
    """Return the parameters of the adapter of a matrix of this shape, or of a stack of them."""
    return math.prod(shape[:-2]) * size.rank * (shape[-2] + shape[-1])


def active_parameters(adapter: BaseStateDictAdapter, sizes: Mapping[str, LoRASize]) -> int:
    """Return how many parameters of adapters a token uses: of stacks of experts those of the chosen ones."""
    active = 0
    for name, size in sizes.items():
        *experts, rows, columns = adapter.native_shapes[name]
        chosen = adapter.args.layer_specs[int(name.split(".")[1])].feed_forward.n_active_experts if experts else 1
        active += chosen * parameter_count((rows, columns), size)
    return active
