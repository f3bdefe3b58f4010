"""Recorded experts: the format in trajectories, and the format that routers replay.

Records hold the experts of each token in each MoE layer: uint8, or uint16 for more than 255 experts. The largest value
marks an unknown token. Routers take int16, negative for an unknown token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from archon.models.args.base import BaseModelArgs
from archon.schema.errors import BatchError, ConfigError

FIELD = "routed_experts"
"""Name of the column, [B, S, MoE layers, experts per token]; index t holds the experts of input token t."""
UNKNOWN_EXPERT = -1
"""Replay value of a token for which the router chooses."""
_MAX_EXPERTS = 2**15


def routed_experts_dtype(args: BaseModelArgs) -> torch.dtype:
    """Return the dtype of a model's records; ConfigError for a model without experts."""
    _, _, n_experts = routed_experts_sizes(args)
    if n_experts > _MAX_EXPERTS:
        raise ConfigError(f"the model has {n_experts} experts a layer; records of experts hold up to {_MAX_EXPERTS}")
    return torch.uint8 if n_experts <= unknown_expert_id(torch.uint8) else torch.uint16


def routed_experts_sizes(args: BaseModelArgs) -> tuple[int, int, int]:
    """Return a model's MoE layers, experts per token, and experts per layer.

    Raises:
        ConfigError: the model has no experts, or its layers differ in these numbers.
    """
    layers = [args.layer_specs[layer].feed_forward for layer in args.expert_layers]
    sizes = {(layer.top_k, layer.n_experts) for layer in layers}
    if len(sizes) != 1:
        layout = f"(experts per token, experts) {sorted(sizes)}" if sizes else "no MoE layers"
        raise ConfigError(
            f"this model has {layout}; recording and replaying experts needs MoE layers of one size: leave "
            "generator.record_experts out"
        )
    ((top_k, n_experts),) = sizes
    return len(layers), top_k, n_experts


def unknown_expert_id(dtype: torch.dtype) -> int:
    """Return the value that marks an unknown token in a record of this dtype."""
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
    """Check that a model can replay these experts.

    Args:
        experts: int16 [T, L, k], as `to_replay` returns them, on the CPU.
        args: the model's arguments.

    Raises:
        BatchError: the shape or an index does not fit the model, a token has only some of the k experts of a layer, or
            it has one expert twice.
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
