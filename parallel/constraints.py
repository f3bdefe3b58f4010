"""What a layout asks of a model and of the options beside it. Needs no weights and no process group."""

from __future__ import annotations

from archon.parallel.compile import CompileChoice, compile_enabled
from archon.parallel.context import ulysses_repeat
from archon.parallel.dims import ArchonParallelDims
from archon.parallel.layout import ModelSizes, ParallelLayout
from archon.parallel.pipeline import SPLIT_BACKWARD, configured_stages
from archon.schema.config import ActivationCheckpointConfig, ContextParallelKind, EngineConfig, PipelineConfig
from archon.schema.errors import ConfigError, LayoutError


def violation(
    layout: ParallelLayout,
    sizes: ModelSizes,
    pipeline: PipelineConfig | None = None,
    context_parallel: str = "auto",
) -> str | None:
    """Returns the first rule of divisibility that the layout breaks for a model of these sizes, or None.

    Where `tp` exceeds the key heads, neighbors share one.
    """
    tp = layout.tp
    if sizes.heads % tp:
        return f"tp = {tp} does not divide the {sizes.heads} attention heads"
    if sizes.key_heads % tp and tp % sizes.key_heads:
        return f"tp = {tp} neither divides the {sizes.key_heads} key heads nor is a multiple of them"
    if sizes.vocab % tp:
        return f"tp = {tp} does not divide the vocabulary of {sizes.vocab}"
    for hidden in sizes.hidden:
        if hidden % tp:
            return f"tp = {tp} does not divide the {hidden} hidden features of a feed-forward network"
    if rule := _experts(layout, sizes):
        return rule
    try:
        context_parallel_kind(context_parallel, layout.cp, tp, sizes.heads, sizes.key_heads)
        if layout.pp > 1:
            configured_stages(pipeline or PipelineConfig(), layout.pp, sizes.layers)
    except LayoutError as error:
        return str(error)
    return None


def _experts(layout: ParallelLayout, sizes: ModelSizes) -> str | None:
    ep, etp = layout.ep, layout.etp
    if not sizes.experts:
        return f"ep = {ep} and etp = {etp} lay out experts, and the model has none" if ep * etp > 1 else None
    if sizes.experts % ep:
        return f"ep = {ep} does not divide the {sizes.experts} experts"
    if sizes.expert_hidden % etp:
        return f"etp = {etp} does not divide the {sizes.expert_hidden} hidden features of an expert"
    return None


def context_parallel_kind(kind: str, cp: int, tp: int, heads: int, key_heads: int) -> ContextParallelKind:
    """`auto` is Ulysses where a rank's heads can be dealt to the `cp` ranks, else all-gather.

    Raises LayoutError where Ulysses is asked for and impossible.
    """
    if kind == "allgather" or cp == 1:
        return "allgather"
    try:
        ulysses_repeat(heads // tp, max(1, key_heads // tp), cp)
    except LayoutError:
        if kind == "ulysses":
            raise
        return "allgather"
    return "ulysses"


def check_options(
    dims: ArchonParallelDims, cpu_offload: bool, ac_config: ActivationCheckpointConfig, enable_compile: CompileChoice
) -> None:
    """Raises ConfigError for options of `parallelize_decoder` that contradict each other or the layout."""
    if cpu_offload and dims.world_size == 1:
        raise ConfigError("cpu_offload = true needs sharded parameters, and one process has none; leave it false")
    if ac_config.mode == "memory_budget" and not compile_enabled(enable_compile, dims.device_type):
        raise ConfigError(
            "activation_checkpoint.mode = memory_budget is carried out by torch.compile, which is off; "
            "set compile = true, or choose full or selective"
        )


def check_config(
    config: EngineConfig,
    dims: ArchonParallelDims,
    has_experts: bool,
    context_parallel: ContextParallelKind,
    attends_gathered: bool,
) -> None:
    """Raises ConfigError for options of the engine that the layout, the model or one another excludes."""
    check_options(dims, config.cpu_offload, config.activation_checkpoint, config.compile)
    if config.router_aux_loss_coef and not has_experts:
        raise ConfigError(
            f"router_aux_loss_coef = {config.router_aux_loss_coef:g} evens the load of experts, and this model has "
            "none; set it to 0"
        )
    if dims.cp_enabled and context_parallel == "allgather" and not attends_gathered:
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
    schedule = config.pipeline.schedule
    if schedule not in SPLIT_BACKWARD:
        return
    if config.reshard_after_forward == "always":
        raise ConfigError(
            f"pipeline.schedule = {schedule} finds the gradients of weights after those of inputs, and weights freed "
            "in between get none; set reshard_after_forward = default, or use interleaved_1f1b"
        )
    if config.activation_checkpoint.mode != "none" or compile_enabled(config.compile, dims.device_type):
        raise ConfigError(
            f"pipeline.schedule = {schedule} splits the backward pass, which recomputed and compiled blocks do not "
            "allow; set activation_checkpoint.mode = none and compile = false, or use interleaved_1f1b"
        )
