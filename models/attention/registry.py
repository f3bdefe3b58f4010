"""Attention backends by name; the choice is explicit, and checked against device and dtype."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch

from archon.models.attention.backend import AttentionBackend
from archon.models.attention.packed.fa4 import FlashAttention4
from archon.models.attention.packed.flash import FlashAttention
from archon.models.attention.packed.sdpa import ScaledDotProductAttention
from archon.models.attention.packed.varlen import VarlenAttention
from archon.models.attention.spec import AttentionSpec
from archon.schema.errors import ConfigError

AUTO_ORDER = ("fa4", "varlen", "flash", "sdpa")
"""The order in which `auto` tries backends. `flash` has the kernels of `varlen`, and soft caps."""

_BACKENDS: dict[str, AttentionBackend] = {}

logger = logging.getLogger(__name__)


def register_attention_backend(backend: AttentionBackend) -> None:
    """Make a backend available as `attn_type`; ValueError for a name that is taken."""
    if backend.name in ("auto", *_BACKENDS):
        raise ValueError(f"attention backend {backend.name!r} is already registered; choose another name")
    _BACKENDS[backend.name] = backend


register_attention_backend(ScaledDotProductAttention())
register_attention_backend(VarlenAttention())
register_attention_backend(FlashAttention())
register_attention_backend(FlashAttention4())


def candidates(attn_type: str) -> tuple[AttentionBackend, ...]:
    """Return the backends that `attn_type` can resolve to; ConfigError for an unknown name."""
    names = AUTO_ORDER if attn_type == "auto" else (attn_type,)
    if any(name not in _BACKENDS for name in names):
        raise ConfigError(f"attn_type is {attn_type!r}; expected one of {', '.join(('auto', *_BACKENDS))}")
    return tuple(_BACKENDS[name] for name in names)


def backends_on(device: torch.device, dtype: torch.dtype) -> list[AttentionBackend]:
    """Return the registered backends that can compute in `dtype` on `device`."""
    return [backend for backend in _BACKENDS.values() if backend.unsupported_reason(device, dtype) is None]


def supports_gathered(attn_type: str) -> bool:
    """Return whether `attn_type` supports keys gathered by context parallelism."""
    return any(backend.supports_gathered for backend in candidates(attn_type))


def saved_ops(attn_type: str) -> frozenset[str]:
    """Return the operators of `attn_type` with results that selective recomputation keeps."""
    return frozenset().union(*(backend.saved_ops for backend in candidates(attn_type)))


@functools.lru_cache(maxsize=64)
def available_backends(attn_type: str, device: torch.device, dtype: torch.dtype) -> tuple[AttentionBackend, ...]:
    """Return the backends for tensors of this device and dtype, the preferred one first.

    A layer uses the first that supports its options, see `backend_for_layer`. `auto` logs its choice once, and which
    preferred backends are missing on a GPU.

    Raises:
        ConfigError: the name is unknown, or the backend cannot run here.
    """
    reasons = {backend: backend.unsupported_reason(device, dtype) for backend in candidates(attn_type)}
    available = tuple(backend for backend, reason in reasons.items() if reason is None)
    if not available:
        raise ConfigError(f"attn_type {attn_type!r} cannot run here: {[*reasons.values()][-1]}; choose sdpa or auto")
    if attn_type == "auto":
        missing = "".join(
            f"; not {backend.name}: {reason}" for backend, reason in reasons.items() if reason is not None
        )
        names = ", else ".join(backend.name for backend in available)
        logger.info(
            "attention backend: %s (auto, %s, %s)%s",
            names,
            device.type,
            dtype,
            missing if device.type == "cuda" else "",
        )
    return available


def resolve_backend(attn_type: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """Return the first of `available_backends`."""
    return available_backends(attn_type, device, dtype)[0]


def backend_for_layer(backends: Sequence[AttentionBackend], spec: AttentionSpec, head_dim: int) -> AttentionBackend:
    """Return the first backend that supports a layer; ConfigError if there is none."""
    reason = None
    for backend in backends:
        reason = backend.layer_unsupported_reason(spec, head_dim)
        if reason is None:
            return backend
    raise ConfigError(str(reason))
