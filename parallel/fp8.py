"""Chooses the products that are computed in 8-bit floating point, and the ranks that agree on each operand's scale.

Converted are the linear layers of a block (roles `column`, `row` and `latent`) and its experts. Not converted are
embedding, head and value head, norms, routers and the gates of shared experts, adapters, convolutions, vision towers,
layers that say so themselves (`quantizable` is False), and those of which a size is no multiple of 16, as the kernels
need; nor the first and the last block where a recipe is for inner ones.

A scale is that of one process: where ranks hold parts of an operand, they take the largest of their values. Data-
parallel ranks, micro-batches and replicas have scales of their own, as micro-batches have in one process.
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
"""The kernels take operands whose rows and columns are multiples of this."""


@dataclass(frozen=True)
class Fp8Scaling:
    """How the operands of one matrix's products are scaled, and which ranks hold parts of them.

    Attributes:
        by_row: each row of inputs, weights and gradients has a scale of its own; else each operand has one.
        in_features, out_features: the ranks that split the columns, or the rows, of the weight.
        tokens: those that split the tokens of a micro-batch.
    """

    by_row: bool
    in_features: Group = SOLO
    out_features: Group = SOLO
    tokens: tuple[Group, ...] = ()


def apply_fp8(
    layers: nn.ModuleDict, dims: ArchonParallelDims, recipe: Fp8Recipe, blocks: Container[int] | None = None
) -> None:
    """Set `fp8` of every layer of the blocks that is converted, in place, after tensor and expert parallelism.

    `blocks` are the indices of those in 8 bits; None for all.

    Raises LayoutError where a rank's share of a layer is no multiple of 16, or several ranks share a head; ConfigError
    where nothing is converted.
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
        reason = _exclusion_reason(module) if role in of_roles or role == "experts" else None
        if reason is not None:
            excluded.append(f"{name} ({reason})")
        elif role in of_roles:
            _require_shards(name, module)
            module.fp8 = of_roles[role]
            converted += 1
        elif role == "experts":
            _require_shards(name, module)
            module.fp8 = _expert_scaling(module, whole)
            converted += 1
    if not converted and not dims.pp_enabled:
        raise ConfigError(f"fp8 = {recipe} converts none of this model's layers: {', '.join(excluded)}; set it to none")
    excluded += [f"block {index} (not inner)" for index in layers if index not in chosen]
    logger.info("fp8 %s: %d layers; excluded in blocks: %s", recipe, converted, ", ".join(excluded) or "none")


def _expert_scaling(module: Any, whole: Fp8Scaling) -> dict[str, Fp8Scaling]:
    """Returns the scaling of each matrix of a stack of experts."""
    group = module.etp or SOLO
    hidden_rows = replace(whole, out_features=group)
    return {"w1": hidden_rows, "w3": hidden_rows, "w2": replace(whole, in_features=group)}


def _weights(module: nn.Module) -> list[nn.Parameter]:
    """Returns the matrices of a layer, or the stacks of experts' matrices."""
    own = dict(module.named_parameters(recurse=False))
    return [own[name] for name in ("weight", "w1", "w2", "w3") if name in own]


def _exclusion_reason(module: nn.Module) -> str | None:
    """Returns why a layer that has such a role is not converted, or None; the same in every layout."""
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
            f"{name}: several ranks share a head, and the rounded terms of its gradient do not sum to the rounded "
            "gradient; fp8 needs t of at most the key heads"
        )
    for weight in _weights(module):
        rows, columns = local_tensor(weight).shape[-2:]
        if rows % MULTIPLE or columns % MULTIPLE:
            raise LayoutError(
                f"{name}: a rank's part is {rows} x {columns}, and fp8 needs multiples of {MULTIPLE}; choose a "
                "smaller t"
            )
