"""LoRA targets: the matrices with a LoRA, and their ranks and scales."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.layers.head import LMHead
from archon.models.layers.linear import Embedding, Linear
from archon.models.layers.moe import GroupedExperts
from archon.schema.config import LoRASpec
from archon.schema.errors import ConfigError
from archon.schema.name_patterns import NamePatterns, name_suffixes

LORA_ROLES = ("column", "row", "latent", "vision")
"""Roles of the linear layers that support LoRA: not routers; embedding and head only if a target names them."""
EMBEDDING, HEAD = "tok_embeddings.weight", "output.weight"
"""Native names of the embedding and of the language-model head."""
VISION_PREFIX = "visual."
"""Prefix of the vision encoder's native names; its matrices get a LoRA only if a target names them."""
EXPERT_MATRICES = ("w1", "w2", "w3")
Value = TypeVar("Value")


@dataclass(frozen=True)
class LoRASize:
    """LoRA rank and alpha; the scale is alpha / rank. Sizes with different `dropout` are equal.

    Attributes:
        dora: whether the matrix has magnitudes, see `archon.models.lora.dora`.
    """

    rank: int
    alpha: float
    rslora: bool
    dropout: float = field(default=0.0, compare=False)
    dora: bool = False

    @property
    def scale(self) -> float:
        """Alpha / rank, or alpha / sqrt(rank) with rslora (Kalajdzievski 2023, arXiv:2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def resolve_lora_sizes(adapter: BaseStateDictAdapter, config: LoRASpec) -> dict[str, LoRASize]:
    """Return the LoRA sizes that `config` requests, by native matrix name, in the model's order.

    Targets and patterns are names of Hugging Face's modules, such as q_proj or layers.3.mlp.down_proj, as in PEFT: a
    name matches every module with this name or with this suffix after a dot. Experts match by the checkpoint's modules
    and by the parameters that stack them.

    Raises:
        ConfigError: a target matches nothing, names only some experts of a layer, or a rank exceeds the matrix.
    """
    # Module names in checkpoints, and in transformers' model, which stacks experts.
    modules = {
        name: [hf_modules(form, name) for form in (adapter, adapter.in_memory)] for name in lora_matrices(adapter)
    }
    targets = [config.targets] if isinstance(config.targets, str) else config.targets
    everything = targets == ["all-linear"]
    selected = {name for name in modules if everything and not name.startswith((VISION_PREFIX, EMBEDDING, HEAD))}
    for target in [] if everything else targets:
        named = {name for name, spellings in modules.items() if _matches(target, spellings)}
        if not named and adapter.is_tied and target in name_suffixes(tied := _tied_head(adapter)):
            require_untied(adapter, tied)
        if not named:
            known = {module for spellings in modules.values() for names in spellings for module in names}
            leaves = sorted({module.rpartition(".")[2] for module in known})
            raise ConfigError(
                f"lora.targets has {target!r}, which is none of this model's linear layers; expected all-linear, or "
                f"names of {', '.join(leaves)}"
            )
        selected |= named
    if EMBEDDING in selected:
        require_untied(adapter, modules[EMBEDDING][0][0])
    ranks, alphas = NamePatterns(config.rank_pattern), NamePatterns(config.alpha_pattern)
    sizes = {
        name: LoRASize(
            int(_pattern_value("rank_pattern", ranks, spellings, config.rank)),
            float(_pattern_value("alpha_pattern", alphas, spellings, config.alpha)),
            config.rslora,
            dora=config.dora,
        )
        for name, spellings in modules.items()
        if name in selected
    }
    for name, size in sizes.items():
        if size.rank > max(adapter.native_shapes[name][-2:]):
            raise ConfigError(
                f"lora: {modules[name][0][0]!r} has rank {size.rank}, more than its matrix has rows and columns, "
                f"{adapter.native_shapes[name][-2:]}; choose a smaller rank, or set one by rank_pattern"
            )
        if size.dora and name in (EMBEDDING, HEAD):
            raise ConfigError(
                f"lora.dora is true, and {modules[name][0][0]!r} is the embedding or the head, whose DoRA is not "
                "supported; leave it out of targets, or set dora to false"
            )
        if size.dora and len(adapter.native_shapes[name]) > 2:
            raise ConfigError(
                f"lora.dora is true, and {modules[name][0][0]!r} is an expert; DoRA of experts is not supported, as in "
                "PEFT: leave experts out of targets, or set dora to false"
            )
    return sizes


def _tied_head(adapter: BaseStateDictAdapter) -> str:
    return adapter.in_memory.to_hf_map[HEAD].removesuffix(".weight")


def require_untied(adapter: BaseStateDictAdapter, name: str) -> None:
    """Raise ConfigError for a LoRA of the embedding if it is also the head."""
    if adapter.is_tied:
        raise ConfigError(
            f"lora: {name!r} is the embedding or the head, which this model ties, so a LoRA of one of them cannot be "
            "merged; leave it out of targets, or train both whole by modules_to_save"
        )


def lora_matrices(adapter: BaseStateDictAdapter) -> list[str]:
    """Return the native names of the matrices that support LoRA, in the model's order."""
    names = []
    for prefix, module in adapter.meta_model.named_modules():
        if isinstance(module, Embedding | LMHead):
            if f"{prefix}.weight" in adapter.native_shapes:  # without a tied head
                names.append(f"{prefix}.weight")
        elif isinstance(module, Linear) and module.role in LORA_ROLES:
            names.append(f"{prefix}.weight")
        elif isinstance(module, GroupedExperts):
            names += [f"{prefix}.{matrix}" for matrix in EXPERT_MATRICES if getattr(module, matrix) is not None]
    return names


def hf_modules(adapter: BaseStateDictAdapter, name: str) -> list[str]:
    """Return the Hugging Face modules of a matrix; one per expert for stacked experts."""
    return [hf.removesuffix(".weight") for hf in adapter.hf_names(name)]


def _matches(target: str, spellings: Iterable[list[str]]) -> bool:
    return any(
        _common_value("targets", modules, [target in name_suffixes(module) for module in modules])
        for modules in spellings
    )


def _pattern_value(
    field: str, patterns: NamePatterns[int] | NamePatterns[float], spellings: Iterable[list[str]], default: float
) -> float:
    """Return the value of the first pattern that matches a matrix's modules."""
    for modules in spellings:
        value = _common_value(field, modules, [patterns.first(module, 0) for module in modules])
        if value:
            return value
    return default


def _common_value(field: str, modules: Sequence[str], values: Sequence[Value]) -> Value:
    """Return the common value of a matrix's modules; ConfigError if experts differ."""
    for module, value in zip(modules, values, strict=True):
        if value != values[0]:
            raise ConfigError(
                f"lora.{field} differs between {modules[0]!r} and {module!r}; the experts of a layer need LoRAs of one "
                "size, or none: name all of them"
            )
    return values[0]


def parameter_count(shape: Sequence[int], size: LoRASize) -> int:
    """Return the LoRA parameters of a matrix, or a stack, of this shape."""
    return math.prod(shape[:-2]) * size.rank * (shape[-2] + shape[-1]) + size.dora * shape[-2]


def active_parameters(adapter: BaseStateDictAdapter, sizes: Mapping[str, LoRASize]) -> int:
    """Return the number of LoRA parameters per token; only the chosen experts of a stack count."""
    active = 0
    for name, size in sizes.items():
        *experts, rows, columns = adapter.native_shapes[name]
        chosen = adapter.args.layer_specs[int(name.split(".")[1])].feed_forward.top_k if experts else 1
        active += chosen * parameter_count((rows, columns), size)
    return active
