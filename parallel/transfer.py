"""Copies from the host to a device that the host does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device_async(x: Tensor, device: torch.device) -> Tensor:
    """Returns `x` on `device`; copied asynchronously from pinned memory if that is a GPU.

    For a copy from other memory the host waits until the kernels before it have run.
    """
    if device.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
