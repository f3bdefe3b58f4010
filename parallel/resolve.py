"""Parse a layout string and validate it against model sizes and configuration, without weights or process groups."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from archon.parallel.compile import CompileChoice, compile_enabled
from archon.parallel.context import ulysses_repeat
from archon.parallel.dims import ArchonParallelDims
from archon.parallel.layout import ModelSizes, ParallelLayout, nearest_layouts, parse_layout
from archon.parallel.pipeline import SPLIT_BACKWARD, StagePlan, plan_stages
from archon.schema.config import ActivationCheckpointConfig, ContextParallelKind, EngineConfig, PipelineConfig
from archon.schema.errors import ConfigError, LayoutError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResolvedLayout:
    """Validated layout of one model under one configuration.

    Attributes:
        layout: the degrees.
        dims: the degrees with their meshes.
        context_parallel: the resolved kind.
        stages: pipeline stages; None without a pipeline.
        compiled: whether blocks are compiled on this device.
    """

    layout: ParallelLayout
    dims: ArchonParallelDims
    context_parallel: ContextParallelKind
    stages: StagePlan | None
    compiled: bool

    def __str__(self) -> str:
        return str(self.layout)


def resolve_layout(
    config: EngineConfig, sizes: ModelSizes, device_type: str = "cpu", *, supports_gathered: bool = True
) -> ResolvedLayout:
    """Resolve `config.layout` for a model of `sizes`, before any process group is created.

    Args:
        config: the engine section.
        sizes: the model sizes that degrees must divide.
        device_type: cpu or cuda.
        supports_gathered: whether the attention backend can attend to keys gathered from other ranks.

    Raises:
        LayoutError: the string is invalid or a degree does not divide a size; names the nearest layouts that fit.
        ConfigError: options are incompatible with the layout or with each other.
    """
    layout = parse_layout(config.layout)

    def broken_rule(candidate: ParallelLayout) -> str | None:
        return find_violation(candidate, sizes, config.pipeline, config.context_parallel)

    def fits(candidate: ParallelLayout) -> bool:
        has_stages = candidate.pp > 1 or config.pipeline.layers_per_stage is None
        return has_stages and broken_rule(candidate) is None

    if rule := broken_rule(layout):
        near = nearest_layouts(layout, layout.world_size, fits=fits)
        raise LayoutError(
            f"layout {layout}: {rule}; nearest layouts that this model fits: {', '.join(map(str, near)) or 'none'}"
        )
    dims = layout.dims(device_type)
    kind = model_context_parallel_kind(config.context_parallel, layout, sizes)
    check_config(config, dims, sizes.experts > 0, kind, supports_gathered)
    if dims.cp_enabled and config.context_parallel == "auto":
        logger.info("context parallelism over %d ranks: %s", layout.cp, kind)
    if config.pipeline.layers_per_stage is not None and not dims.pp_enabled:
        raise ConfigError(
            f"pipeline.layers_per_stage is {config.pipeline.layers_per_stage}, but layout {layout} has no pipeline "
            "stages; add p, such as p2, to the layout, or remove it"
        )
    stages = plan_stages(config.pipeline, layout.pp, sizes.layers, sizes.deepstack_layers) if dims.pp_enabled else None
    return ResolvedLayout(layout, dims, kind, stages, compile_enabled(config.compile, device_type))


def find_violation(
    layout: ParallelLayout,
    sizes: ModelSizes,
    pipeline: PipelineConfig | None = None,
    context_parallel: str = "auto",
) -> str | None:
    """Return the first divisibility rule that the layout breaks for these model sizes, or None.

    If `tp` exceeds the number of key heads, neighboring ranks share a head.
    """
    tp, ep, etp = layout.tp, layout.ep, layout.etp
    for heads, kv_heads in sizes.mixer_heads:
        if heads % tp:
            return f"tp = {tp} does not divide the {heads} attention heads"
        if kv_heads % tp and tp % kv_heads:
            return f"tp = {tp} neither divides the {kv_heads} KV heads nor is a multiple of them"
    if sizes.vocab % tp:
        return f"tp = {tp} does not divide the vocabulary of {sizes.vocab}"
    for hidden in sizes.hidden:
        if hidden % tp:
            return f"tp = {tp} does not divide the {hidden} hidden features of a feed-forward network"
    if not sizes.experts and ep * etp > 1:
        return f"ep = {ep} and etp = {etp} lay out experts, and the model has none"
    if sizes.experts % ep:
        return f"ep = {ep} does not divide the {sizes.experts} experts"
    if sizes.expert_hidden % etp:
        return f"etp = {etp} does not divide the {sizes.expert_hidden} hidden features of an expert"
    try:
        model_context_parallel_kind(context_parallel, layout, sizes)
        if layout.pp > 1:
            plan_stages(pipeline or PipelineConfig(), layout.pp, sizes.layers, sizes.deepstack_layers)
    except LayoutError as error:
        return str(error)
    return None


def model_context_parallel_kind(kind: str, layout: ParallelLayout, sizes: ModelSizes) -> ContextParallelKind:
    """Resolve `auto` for all layers of a model: Ulysses if the ranks can divide the heads of every layer.

    Raises:
        LayoutError: Ulysses is requested or needed, and impossible.
    """
    if layout.cp > 1 and sizes.needs_ulysses is not None:
        if kind == "allgather":
            raise LayoutError(
                f"context_parallel = allgather gathers keys, and {sizes.needs_ulysses}; set context_parallel = ulysses"
            )
        for heads, kv_heads in sizes.mixer_heads:
            if context_parallel_kind("auto", layout.cp, layout.tp, heads, kv_heads) != "ulysses":
                raise LayoutError(
                    f"cp = {layout.cp} does not divide the {heads // layout.tp} heads of a rank, as it must where "
                    f"{sizes.needs_ulysses}"
                )
    kinds = {context_parallel_kind(kind, layout.cp, layout.tp, *heads) for heads in sizes.mixer_heads}
    return "ulysses" if kinds == {"ulysses"} else "allgather"


def context_parallel_kind(kind: str, cp: int, tp: int, heads: int, kv_heads: int) -> ContextParallelKind:
    """Resolve `auto`: Ulysses if the `cp` ranks can divide the heads of a rank, else all-gather.

    Raises:
        LayoutError: Ulysses is requested and impossible.
    """
    if kind == "allgather" or cp == 1:
        return "allgather"
    try:
        ulysses_repeat(heads // tp, max(1, kv_heads // tp), cp)
    except LayoutError:
        if kind == "ulysses":
            raise
        return "allgather"
    return "ulysses"


def check_options(
    dims: ArchonParallelDims, cpu_offload: bool, ac_config: ActivationCheckpointConfig, enable_compile: CompileChoice
) -> None:
    """Raise ConfigError if options of `parallelize_decoder` contradict each other or the layout."""
    if cpu_offload and dims.world_size == 1:
        raise ConfigError("cpu_offload = true needs sharded parameters, and one process has none; leave it false")
    if ac_config.mode == "memory_budget" and not compile_enabled(enable_compile, dims.device_type):
        raise ConfigError(
            "activation_checkpoint.mode = memory_budget needs torch.compile, which is off; set compile = true, or "
            "choose full or selective"
        )


def check_config(
    config: EngineConfig,
    dims: ArchonParallelDims,
    has_experts: bool,
    context_parallel: ContextParallelKind,
    supports_gathered: bool,
) -> None:
    """Raise ConfigError if engine options are incompatible with the layout, the model or each other."""
    check_options(dims, config.cpu_offload, config.activation_checkpoint, config.compile)
    if config.router_aux_loss_coef and not has_experts:
        raise ConfigError(
            f"router_aux_loss_coef = {config.router_aux_loss_coef:g} balances experts, and this model has none; set it "
            "to 0"
        )
    if config.fp8 != "none" and dims.device_type == "cuda" and config.dtype != "bfloat16":
        raise ConfigError(
            f"fp8 = {config.fp8} has kernels for dtype = bfloat16 alone, and it is {config.dtype}; set it to bfloat16"
        )
    if config.gradient_reduction == "step_in_backward" and dims.world_size > 1:
        raise ConfigError(
            f"gradient_reduction = step_in_backward runs on one process, and layout {config.layout} has "
            f"{dims.world_size}; set it to per_step or per_microbatch"
        )
    if dims.cp_enabled and context_parallel == "allgather" and not supports_gathered:
        raise ConfigError(
            f"attn_type = {config.attn_type} does not run where context parallelism gathers keys, as it does with "
            f"context_parallel = {config.context_parallel} here; set attn_type = varlen, or context_parallel = ulysses"
        )
    if not dims.pp_enabled:
        return
    if config.mtp_loss_weight:
        raise ConfigError(
            f"mtp_loss_weight = {config.mtp_loss_weight:g} trains layers that need the embedding and the head on one "
            "rank, and a pipeline has them on different ranks; use p1, or set it to 0"
        )
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
            f"pipeline.schedule = {schedule} computes weight gradients after input gradients, and weights freed in "
            "between get none; set reshard_after_forward = default, or use interleaved_1f1b"
        )
    if config.activation_checkpoint.mode != "none" or compile_enabled(config.compile, dims.device_type):
        raise ConfigError(
            f"pipeline.schedule = {schedule} splits the backward pass, which recomputed and compiled blocks do not "
            "allow; set activation_checkpoint.mode = none and compile = false, or use interleaved_1f1b"
        )
