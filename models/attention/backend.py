"""Which kernel attends: an explicit choice, checked against what this machine and dtype can do."""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import get_args

import torch

from archon.schema.config import AttnType
from archon.schema.errors import ConfigError

ATTN_TYPES: tuple[AttnType, ...] = get_args(AttnType)

logger = logging.getLogger(__name__)


def _obstacle(attn_type: AttnType, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this backend cannot run here, or None."""
    if attn_type == "sdpa":
        return None
    if device.type != "cuda":
        return f"it runs on CUDA only and the model is on {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 or bfloat16 and the model computes in {str(dtype).removeprefix('torch.')}"
    if attn_type == "flash" and importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed (pip install 'archon-engine[flash]')"
    return None


@functools.lru_cache(maxsize=64)
def resolve_backend(attn_type: AttnType, device: torch.device, dtype: torch.dtype) -> AttnType:
    """The backend for tensors of this device and dtype; `auto` logs what it chose, once.

    Raises ConfigError for an unknown name and for a backend that cannot run here.
    """
    if attn_type not in ATTN_TYPES:
        raise ConfigError(f"attn_type is {attn_type!r}; expected one of {', '.join(ATTN_TYPES)}")
    if attn_type != "auto":
        reason = _obstacle(attn_type, device, dtype)
        if reason is not None:
            raise ConfigError(f"attn_type {attn_type!r} is impossible here: {reason}; choose sdpa or auto")
        return attn_type
    chosen: AttnType = next(c for c in ("varlen", "sdpa") if _obstacle(c, device, dtype) is None)
    logger.info("attention backend: %s (auto, %s, %s)", chosen, device.type, dtype)
    return chosen
