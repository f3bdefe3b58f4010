"""Does the replica fit: how many pages the cache gets, or a refusal that shows the estimate."""

from __future__ import annotations

from pathlib import Path

import torch

from archon.models.base import BaseArchonModel
from archon.schema.errors import RolloutError

# Share of the free memory the cache may take when its size is not given.
_DEFAULT_SHARE = 0.25


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RolloutError("/proc/meminfo has no MemAvailable line, so it is not known what the generator may take")


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
    """Pages of the cache; `RolloutError` with the estimate when they and a copy of the weights exceed what is free."""
    args = model.args
    page_bytes = 2 * args.n_layers * args.n_kv_heads * page_size * args.head_dim * dtype.itemsize
    weight_bytes = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    free = free_memory(device)
    if n_pages is None:
        room = int(free * _DEFAULT_SHARE) if cache_bytes is None else cache_bytes
        n_pages = min(max_slots * -(-max_seq_len // page_size), room // page_bytes)
    if n_pages < 1:
        raise RolloutError(f"the key-value cache has no page: one of {page_size} tokens takes {page_bytes} bytes")
    needed = weight_bytes + n_pages * page_bytes
    if needed > free:
        raise RolloutError(
            f"the generator does not fit: {weight_bytes / 2**30:.2f} GiB of weights and"
            f" {n_pages * page_bytes / 2**30:.2f} GiB of cache ({n_pages} pages of {page_size} tokens) are needed,"
            f" {free / 2**30:.2f} GiB are free;"
            " give it fewer pages, or a narrower dtype"
        )
    return n_pages
