"""Tensor-parallel plans of families, and their `parallelize_<family>` functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

from archon.parallel.decoder import parallelize_decoder
from archon.parallel.tensor import ParallelStyle

# Treatment of each weight role under tensor parallelism; see `archon.parallel.tensor`.
DENSE_TP_PLAN: dict[str, ParallelStyle] = {
    "column": "split_rows",
    "row": "split_columns",
    "latent": "replicate",
    "norm": "replicate",
    "head_norm": "replicate",
    "heads": "split_rows",
    "heads_norm": "split_rows",
    "embedding": "split_rows",
    "head": "split_rows",
    "value_head": "replicate",
    "vision": "replicate",
}
# Experts need no entry: expert parallelism shards them.
MOE_TP_PLAN: dict[str, ParallelStyle] = DENSE_TP_PLAN | {"router": "replicate"}


def make_parallelize_fn(tp_plan: Mapping[str, ParallelStyle]) -> Callable[..., nn.Module]:
    """Return `archon.parallel.decoder.parallelize_decoder` with a family's tensor-parallel plan."""
    return partial(parallelize_decoder, tp_plan)
