"""Asynchronous copies from host to device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device_async(x: Tensor, device: torch.device) -> Tensor:
    """Return `x` on `device`, copied asynchronously from pinned memory to a GPU.

    A copy from pageable memory would make the host wait for all earlier kernels.
    """
    if device.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
