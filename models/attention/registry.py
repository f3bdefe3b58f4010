"""Attention backends by name; the choice is explicit, and checked against device and dtype."""

from __future__ import annotations

import functools
import logging

import torch

from archon.models.attention.backend import AttentionBackend
from archon.models.attention.packed.flash import FlashAttention
from archon.models.attention.packed.sdpa import ScaledDotProductAttention
from archon.models.attention.packed.varlen import VarlenAttention
from archon.schema.errors import ConfigError

AUTO_ORDER = ("varlen", "sdpa")
"""`auto` chooses the first one that can run."""

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


def candidates(attn_type: str) -> tuple[AttentionBackend, ...]:
    """Return the backends that `attn_type` can resolve to; ConfigError for an unknown name."""
    names = AUTO_ORDER if attn_type == "auto" else (attn_type,)
    if any(name not in _BACKENDS for name in names):
        raise ConfigError(f"attn_type is {attn_type!r}; expected one of {', '.join(('auto', *_BACKENDS))}")
    return tuple(_BACKENDS[name] for name in names)


def supports_gathered(attn_type: str) -> bool:
    """Return whether `attn_type` supports keys gathered by context parallelism."""
    return all(backend.supports_gathered for backend in candidates(attn_type))


def saved_ops(attn_type: str) -> frozenset[str]:
    """Return the operators of `attn_type` with results that selective recomputation keeps."""
    return frozenset().union(*(backend.saved_ops for backend in candidates(attn_type)))


@functools.lru_cache(maxsize=64)
def resolve_backend(attn_type: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """Return the backend for tensors of this device and dtype; `auto` logs its choice once.

    Raises:
        ConfigError: the name is unknown, or the backend cannot run here.
    """
    for backend in candidates(attn_type):
        reason = backend.unsupported_reason(device, dtype)
        if reason is None:
            if attn_type == "auto":
                logger.info("attention backend: %s (auto, %s, %s)", backend.name, device.type, dtype)
            return backend
    raise ConfigError(f"attn_type {attn_type!r} cannot run here: {reason}; choose sdpa or auto")
