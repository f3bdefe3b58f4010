"""Chooses the number of pages of the key-value cache, and checks that the replica and the cache fit in memory."""

from __future__ import annotations

from pathlib import Path

import torch

from archon.models.base import BaseArchonModel
from archon.schema.errors import RolloutError

# Share of the free memory that the cache takes at most when its size is not given.
_DEFAULT_SHARE = 0.25


def free_memory(device: torch.device) -> int:
    """Returns the bytes that can still be allocated on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RolloutError("/proc/meminfo has no MemAvailable line; expected one, to size the generator's cache")


def choose_page_count(
    model: BaseArchonModel,
    dtype: torch.dtype,
    device: torch.device,
    max_slots: int,
    max_seq_len: int,
    page_size: int,
    n_pages: int | None,
    cache_bytes: int | None,
) -> int:
    """Returns the number of pages of the cache.

    Raises RolloutError, with the estimate, where the cache and a copy of the weights exceed the free memory.
    """
    args = model.args
    page_bytes = 2 * args.n_layers * args.n_kv_heads * page_size * args.head_dim * dtype.itemsize
    weight_bytes = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    free = free_memory(device)
    if n_pages is None:
        budget = int(free * _DEFAULT_SHARE) if cache_bytes is None else cache_bytes
        n_pages = min(max_slots * -(-max_seq_len // page_size), budget // page_bytes)
    if n_pages < 1:
        raise RolloutError(
            f"the key-value cache has no page: one of {page_size} tokens takes {page_bytes} bytes; give it more memory"
        )
    needed = weight_bytes + n_pages * page_bytes
    if needed > free:
        raise RolloutError(
            f"the generator does not fit: {weight_bytes / 2**30:.2f} GiB of weights and"
            f" {n_pages * page_bytes / 2**30:.2f} GiB of cache ({n_pages} pages of {page_size} tokens) are needed,"
            f" {free / 2**30:.2f} GiB are free;"
            " give it fewer pages, or a narrower dtype"
        )
    return n_pages
