"""Experts that a generator chose, as trajectories store them and as a trainer's routers are given them.

Stored are the experts of each token in each layer that has experts: uint8, or uint16 where there are more than 255; the
largest number stands for a token of which nothing is known. Routers are given int16, negative for such a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from archon.models.args.base import BaseModelArgs
from archon.schema.errors import BatchError, ConfigError

FIELD = "routed_experts"
"""The name of the column, [B, S, layers with experts, experts a token]; index t is about the token t that is read."""
UNKNOWN_EXPERT = -1
"""What routers are given for a token whose experts they choose themselves."""
_MAX_EXPERTS = 2**15


def routed_experts_dtype(args: BaseModelArgs) -> torch.dtype:
    """Return the dtype in which a model's choices are stored. Raises ConfigError for a model without experts."""
    _, _, n_experts = routed_experts_sizes(args)
    if n_experts > _MAX_EXPERTS:
        raise ConfigError(f"the model has {n_experts} experts a layer; records of experts hold up to {_MAX_EXPERTS}")
    return torch.uint8 if n_experts <= unknown_expert_id(torch.uint8) else torch.uint16


def routed_experts_sizes(args: BaseModelArgs) -> tuple[int, int, int]:
    """Return a model's layers with experts, the experts that a token uses, and those there are.

    Raises ConfigError for a model without experts, and for one whose layers differ in these numbers.
    """
    layers = [args.layer_specs[layer].feed_forward for layer in args.expert_layers]
    sizes = {(layer.n_active_experts, layer.n_experts) for layer in layers}
    if len(sizes) != 1:
        found = "no layer with experts" if not sizes else f"layers of {sorted(sizes)} experts a token and in all"
        raise ConfigError(
            f"experts can be recorded and replayed in a model whose layers with experts are alike, and this one has "
            f"{found}; leave generator.record_experts out"
        )
    ((top_k, n_experts),) = sizes
    return len(layers), top_k, n_experts


def unknown_expert_id(dtype: torch.dtype) -> int:
    """Return the number that stands for a token of which nothing is known, in a record of this dtype."""
    return torch.iinfo(dtype).max


def to_replay(record: Tensor) -> Tensor:
    """Convert a record, uint8 or uint16 [..., L, k], to the routers' format: int16, negative for unknown tokens.

    Raises:
        BatchError: the dtype is another one, or an expert index does not fit int16.
    """
    if record.dtype not in (torch.uint8, torch.uint16):
        raise BatchError(f"field {FIELD!r} is {record.dtype}; expected uint8, or uint16 for more than 255 experts")
    wide = record.to(torch.int32)
    wide = wide.masked_fill(wide == unknown_expert_id(record.dtype), UNKNOWN_EXPERT)
    if wide.numel() and int(wide.max()) >= _MAX_EXPERTS:
        raise BatchError(f"field {FIELD!r} names expert {int(wide.max())}; expected less than {_MAX_EXPERTS}")
    return wide.to(torch.int16)


def check_replay(experts: Tensor, args: BaseModelArgs) -> None:
    """Check that experts can be replayed in a model.

    Args:
        experts: int16 [T, L, k], as `to_replay` returns them, on the CPU.
        args: the model's arguments.

    Raises:
        BatchError: the shape or an index is not the model's, a token has experts in some of the k places of a layer
            and none in the others, or it has one expert twice.
    """
    layers, top_k, n_experts = routed_experts_sizes(args)
    if tuple(experts.shape[1:]) != (layers, top_k):
        raise BatchError(
            f"field {FIELD!r} has {list(experts.shape[1:])} numbers a token; this model has {layers} layers with "
            f"experts, and a token uses {top_k} in each"
        )
    if experts.numel() and int(experts.max()) >= n_experts:
        raise BatchError(f"field {FIELD!r} names expert {int(experts.max())}; this model has {n_experts} in a layer")
    known = experts >= 0
    partial = known.any(-1) & ~known.all(-1)
    if partial.any():
        raise BatchError(_describe(experts, partial, "expected all experts of a token in a layer, or none"))
    # Comparing shifted columns reads the record (k - 1) / 2 times; sorting each short row takes several times longer.
    for shift in range(1, top_k):
        repeated = ((experts[..., shift:] == experts[..., :-shift]) & known[..., shift:]).any(-1)
        if repeated.any():
            raise BatchError(_describe(experts, repeated, "expected different experts"))


def _describe(experts: Tensor, wrong: Tensor, expected: str) -> str:
    """Describe the first token and layer that is wrong, for experts [T, L, k] and a mask [T, L]."""
    token, layer = wrong.nonzero()[0].tolist()
    names = ", ".join(str(index) if index >= 0 else "unknown" for index in experts[token, layer].tolist())
    return f"field {FIELD!r} has the experts {names} for token {token} of the pack in MoE layer {layer}; {expected}"
