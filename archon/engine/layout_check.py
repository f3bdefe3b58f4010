"""What is refused of a layout for a model and its options, before any process group is made."""

from __future__ import annotations

from archon.models.args import BaseModelArgs
from archon.models.attention.registry import candidates
from archon.parallel.compile import compile_enabled
from archon.parallel.context import context_parallel_kind
from archon.parallel.decoder import check_options
from archon.parallel.dims import ArchonParallelDims
from archon.parallel.fit import Fit
from archon.parallel.layout import parse_layout
from archon.parallel.pipeline import SPLIT_BACKWARD
from archon.schema.config import EngineConfig
from archon.schema.errors import ConfigError


def check_layout(config: EngineConfig, args: BaseModelArgs, dims: ArchonParallelDims) -> None:
    """Raises LayoutError, with the nearest layouts that fit, for sizes of the model that a degree does not divide, and
    ConfigError for options that the layout or one another excludes."""
    sizes = args.sizes
    Fit(sizes, config.pipeline, config.context_parallel).check(parse_layout(config.layout))
    check_options(dims, config.cpu_offload, config.activation_checkpoint, config.compile)
    if config.router_aux_loss_coef and not sizes.experts:
        raise ConfigError(
            f"router_aux_loss_coef = {config.router_aux_loss_coef:g} evens the load of experts, and this model has "
            "none; set it to 0"
        )
    kind = context_parallel_kind(config.context_parallel, dims.cp, dims.tp, sizes.heads, sizes.key_heads)
    attends_gathered = all(backend.attends_gathered for backend in candidates(config.attn_type))
    if dims.cp > 1 and kind == "allgather" and not attends_gathered:
        raise ConfigError(
            f"attn_type = {config.attn_type} does not run where context parallelism gathers keys, as it does with "
            f"context_parallel = {config.context_parallel} here; set attn_type = varlen, or context_parallel = ulysses"
        )
    if dims.pp_enabled:
        _check_pipeline(config, dims)


def _check_pipeline(config: EngineConfig, dims: ArchonParallelDims) -> None:
    if config.router_aux_loss_coef:
        raise ConfigError(
            "router_aux_loss_coef needs the routers of all layers at once, and a pipeline has them on different "
            "ranks; use p1, or balance by bias"
        )
    if config.gradient_reduction == "per_microbatch":
        raise ConfigError("a pipeline reduces gradients once a step; set gradient_reduction = per_step")
    if config.pipeline.schedule not in SPLIT_BACKWARD:
        return
    if config.reshard_after_forward == "always":
        raise ConfigError(
            f"pipeline.schedule = {config.pipeline.schedule} finds the gradients of weights after those of inputs, "
            "and weights freed in between get none; set reshard_after_forward = default, or use interleaved_1f1b"
        )
    if config.activation_checkpoint.mode != "none" or compile_enabled(config.compile, dims.device_type):
        raise ConfigError(
            f"pipeline.schedule = {config.pipeline.schedule} splits the backward pass, which recomputed and compiled "
            "blocks do not allow; set activation_checkpoint.mode = none and compile = false, or use interleaved_1f1b"
        )
