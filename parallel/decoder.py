"""Parallelize a decoder of any family in one fixed order; families supply data, not code."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import nn

from archon.parallel.activation_checkpoint import apply_activation_checkpointing
from archon.parallel.compile import CompileChoice, apply_compile, compile_enabled
from archon.parallel.dims import ArchonParallelDims
from archon.parallel.expert import apply_expert_parallel
from archon.parallel.fp8 import apply_fp8
from archon.parallel.fsdp import ReshardPolicy, apply_fsdp, check_reshard_policy
from archon.parallel.mixed_precision import apply_mixed_precision
from archon.parallel.resolve import check_options
from archon.parallel.tensor import ParallelStyle, apply_tensor_parallel
from archon.schema.config import ActivationCheckpointConfig, Fp8Recipe
from archon.schema.errors import ConfigError, LayoutError

logger = logging.getLogger(__name__)


def parallelize_decoder(
    tp_plan: Mapping[str, ParallelStyle],
    model: nn.Module,
    parallel_dims: ArchonParallelDims,
    param_dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
    loss_parallel: bool = True,
    cpu_offload: bool = False,
    reshard_after_forward_policy: ReshardPolicy = "default",
    ac_config: ActivationCheckpointConfig | None = None,
    enable_compile: CompileChoice = "auto",
    fp8: Fp8Recipe = "none",
    fp8_blocks: Container[int] | None = None,
) -> nn.Module:
    """Apply the layout `parallel_dims` to `model`, built on the meta device, in place.

    The order is TP → EP → CP → FP8 → activation checkpointing → compile → FSDP → weight tying. Sharding inside a block
    comes before everything that wraps the block, recomputation is inside the compiled region, and FSDP is outermost, so
    its hooks stay eager. FSDP also sums the gradients of parameters that tensor parallelism replicates. It is therefore
    always applied on several ranks. One process has mixed precision in its place, if the compute dtype differs from the
    dtype of the parameters. Modules with `casts_parameters`, such as LoRA layers, cast their parameters themselves, so
    frozen weights are not copied.

    Args:
        tp_plan: the tensor-parallel plan of the family, by role; used if tp > 1.
        model: a decoder with its blocks in `layers` (an `nn.ModuleDict`), a method `tie_weights`, and `attention_ops`,
            the attention operators that selective recomputation keeps. Layers of multi-token prediction, if any, are
            in `mtp`, each with a `block`.
        parallel_dims: degrees and meshes of the layout.
        param_dtype: dtype of the computation.
        reduce_dtype: dtype in which gradients are accumulated and reduced.
        loss_parallel: keep the vocabulary sharded through the loss; used if tp > 1.
        cpu_offload: keep shards on the CPU; an error on one process.
        reshard_after_forward_policy: see `apply_fsdp`.
        ac_config: activation checkpointing; None keeps everything.
        enable_compile: torch.compile each block; `auto` is on for CUDA.
        fp8: the FP8 recipe, see `archon.parallel.fp8`.
        fp8_blocks: indices of the blocks with FP8 matmuls; None for all.

    Raises:
        LayoutError: the layout does not fit the model.
        ConfigError: options contradict each other.
    """
    dims = parallel_dims
    decoder: Any = model
    if dims.tp_enabled and not loss_parallel:
        raise ConfigError("loss_parallel = false would gather the logits under tensor parallelism; leave it true")
    ac = ac_config or ActivationCheckpointConfig()
    check_options(dims, cpu_offload, ac, enable_compile)
    compiled = compile_enabled(enable_compile, dims.device_type)
    budget = ac.kept_share if ac.mode == "memory_budget" else None
    has_experts = any(getattr(module, "role", None) == "experts" for module in model.modules())
    if (dims.ep_enabled or dims.etp_enabled) and not has_experts and dims.pp == 1:
        raise LayoutError(f"ep = {dims.ep} and etp = {dims.etp} lay out experts, and this model has none; leave e out")
    if dims.tp_enabled:
        apply_tensor_parallel(model, dims.get_mesh("tp"), tp_plan)
    if has_experts and (dims.ep_enabled or dims.etp_enabled):
        apply_expert_parallel(model, *(dims.get_mesh(d) if getattr(dims, d) > 1 else None for d in ("ep", "etp")))
    # Context parallelism splits the batch, not the model; see `archon.parallel.context`.
    if fp8 != "none":
        apply_fp8(decoder.layers, dims, fp8, fp8_blocks)
    apply_activation_checkpointing(list(decoder.layers.values()), ac, decoder.attention_ops)
    mtp_layers: Any = nn.ModuleDict() if getattr(decoder, "mtp", None) is None else decoder.mtp
    mtp_blocks = nn.ModuleDict({number: layer.block for number, layer in mtp_layers.items()})
    apply_activation_checkpointing(list(mtp_blocks.values()), ac, decoder.attention_ops)
    vision_encoder = getattr(decoder, "visual", None)
    if vision_encoder is not None:
        apply_activation_checkpointing(list(vision_encoder.blocks), ac, decoder.attention_ops)
    if compiled:
        apply_compile(decoder.layers, memory_budget=budget)
        apply_compile(mtp_blocks, memory_budget=budget)
    decoder.tie_weights()
    built_dtypes = {
        parameter.dtype
        for module in model.modules()
        if not getattr(module, "casts_parameters", False)
        for parameter in module.parameters(recurse=False)
    }
    check_reshard_policy(reshard_after_forward_policy)
    if dims.world_size == 1 and built_dtypes != {param_dtype}:
        apply_mixed_precision(
            model,
            decoder.layers,
            param_dtype,
            free_blocks=reshard_after_forward_policy != "never",
            free_root=reshard_after_forward_policy == "always",
            mtp_layers=mtp_layers,
        )
    elif dims.world_size > 1:
        apply_fsdp(
            model,
            decoder.layers,
            dims.fsdp_mesh,
            param_dtype,
            reduce_dtype,
            reshard_after_forward_policy,
            expert_mesh=dims.expert_fsdp_mesh if has_experts else None,
            cpu_offload=cpu_offload,
            keep_gathered=dims.pp_enabled,
            vision_encoder=vision_encoder,
            mtp_layers=mtp_layers,
        )
    decoder.tie_weights()
    logger.info("parallelized: compute %s, masters %s, compile %s", param_dtype, built_dtypes, compiled)
    return model
