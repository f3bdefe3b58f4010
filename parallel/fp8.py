"""Choose the matmuls that run in FP8, and the ranks that share the scale of each operand.

Converted: the linear layers of a block (roles `column`, `row` and `latent`) and its experts. Not converted: embedding,
heads, norms, routers, gates of shared experts, LoRA, convolutions, vision encoders, layers with `quantizable` = False,
and layers with a size that is not a multiple of 16 (a kernel requirement). Recipes for inner blocks also leave out the
first and the last block.

A layout has the same scales as a single process: ranks that hold parts of an operand use the maximum of their values.
Data-parallel ranks, micro-batches and replicas have separate scales, like micro-batches of one process.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from archon.parallel.comm import Group
from archon.parallel.dims import ArchonParallelDims
from archon.parallel.fsdp import local_tensor
from archon.parallel.ranks import SOLO, Ranks
from archon.schema.config import Fp8Recipe
from archon.schema.errors import ConfigError, LayoutError

logger = logging.getLogger(__name__)

MULTIPLE = 16
"""Kernels require operands with rows and columns that are multiples of this."""


@dataclass(frozen=True)
class Fp8Scaling:
    """Scaling of the operands of one matrix, and the ranks that hold parts of them.

    Attributes:
        by_row: one scale per row of inputs, weights and gradients; otherwise one per operand.
        in_features, out_features: groups that split the columns and the rows of the weight.
        tokens: groups that split the tokens of a micro-batch.
    """

    by_row: bool
    in_features: Group = SOLO
    out_features: Group = SOLO
    tokens: tuple[Group, ...] = ()

    @property
    def is_sharded(self) -> bool:
        """Whether several ranks hold parts of an operand."""
        return any(group.size > 1 for group in (self.in_features, self.out_features, *self.tokens))


def apply_fp8(
    layers: nn.ModuleDict, dims: ArchonParallelDims, recipe: Fp8Recipe, blocks: Container[int] | None = None
) -> None:
    """Set `fp8` of every converted layer, in place, after tensor and expert parallelism.

    Args:
        layers: the blocks by index.
        dims: degrees and meshes.
        recipe: the scaling recipe.
        blocks: indices of the blocks with FP8 matmuls; None for all.

    Raises:
        LayoutError: a local shard has a size that is not a multiple of 16, or several ranks share a head.
        ConfigError: no layer is converted.
    """
    ranks = Ranks.from_dims(dims)
    whole = Fp8Scaling(recipe == "rowwise")
    of_roles = {
        "column": replace(whole, out_features=ranks.tp, tokens=(ranks.cp,)),
        "row": replace(whole, in_features=ranks.tp, tokens=(ranks.cp,)),
        "latent": replace(whole, tokens=(ranks.cp, ranks.tp)),
    }
    converted, excluded = 0, list[str]()
    chosen = {index: block for index, block in layers.items() if blocks is None or int(index) in blocks}
    for name, module in nn.ModuleDict(chosen).named_modules(prefix="layers"):
        role = getattr(module, "role", None)
        if role not in of_roles and role != "experts":
            continue
        if reason := _exclusion_reason(module):
            excluded.append(f"{name} ({reason})")
            continue
        _require_shards(name, module)
        converted += 1
        module.fp8 = of_roles.get(role)
        if role == "experts":  # each matrix of the stack has a scaling
            group = module.etp or SOLO
            hidden_rows = replace(whole, out_features=group)
            module.fp8 = {"w1": hidden_rows, "w3": hidden_rows, "w2": replace(whole, in_features=group)}
    if not converted and not dims.pp_enabled:
        raise ConfigError(f"fp8 = {recipe} converts none of this model's layers: {', '.join(excluded)}; set it to none")
    excluded += [f"block {index} (not inner)" for index in layers if index not in chosen]
    logger.info("fp8 %s: %d layers; excluded in blocks: %s", recipe, converted, ", ".join(excluded) or "none")


def _weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the weight of a layer, or the stacked weights of experts."""
    parameters = dict(module.named_parameters(recurse=False))
    return [parameters[name] for name in ("weight", "w1", "w2", "w3") if name in parameters]


def _exclusion_reason(module: nn.Module) -> str | None:
    """Return why a layer is not converted, or None; the same in every layout."""
    if not getattr(module, "quantizable", True):
        return "kept"
    for weight in _weights(module):
        rows, columns = weight.shape[-2:]
        if rows % MULTIPLE or columns % MULTIPLE:
            return f"{rows} x {columns}"
    return None


def _require_shards(name: str, module: Any) -> None:
    if getattr(module, "rows", None) is not None:
        raise LayoutError(
            f"{name}: several ranks share a key head, and the rounded terms of its gradient do not sum to the rounded "
            "gradient; set t to at most the number of key heads, or fp8 to none"
        )
    for weight in _weights(module):
        rows, columns = local_tensor(weight).shape[-2:]
        if rows % MULTIPLE or columns % MULTIPLE:
            raise LayoutError(
                f"{name}: the local shard is {rows} x {columns}, and fp8 needs multiples of {MULTIPLE}; use a smaller t"
            )
