"""Build the state of an initialized engine: model, optimizers, layout and the runner of its steps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from archon.checkpoint.hf_io import load_spec
from archon.checkpoint.hf_reader import require_shapes
from archon.checkpoint.peft.reader import load_lora
from archon.engine.agreement import require_same_engine
from archon.engine.build import (
    ModelBuilder,
    check_model,
    check_quantized_base,
    check_stages,
    lora_dropout,
    lora_sizes,
    lora_specs,
    model_options,
    resolve_device,
    saved_modules,
    with_mtp_layers,
)
from archon.engine.lora import LoRATrainer, check_loras
from archon.engine.memory.recompute import resolve_auto
from archon.engine.optim import LRSchedule, build_optimizer, check_schedule
from archon.engine.pipeline_step import PipelineRunner
from archon.engine.plan import ForwardPlanner
from archon.engine.router_balance import RouterLoad
from archon.engine.step_in_backward import StepInBackward
from archon.engine.train_step import MicroBatchRunner
from archon.models.args.base import BaseModelArgs
from archon.models.attention.registry import resolve_backend, supports_gathered
from archon.models.base import BaseArchonModel
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.layers.delta_rule import require_delta_rule
from archon.models.lora.saved_modules import copy_originals
from archon.models.lora.targets import LoRASize
from archon.models.spec import ModelSpec
from archon.parallel.compile import compile_enabled
from archon.parallel.fsdp import is_sharded
from archon.parallel.mixed_precision import has_mixed_precision
from archon.parallel.pipeline import StagedModel
from archon.parallel.pipeline_schedule import Pipeline
from archon.parallel.process_group import join_process_group, limit_collectives
from archon.parallel.ranks import SOLO, Ranks, stage_group
from archon.parallel.resolve import ResolvedLayout, resolve_layout
from archon.schema.config import EngineConfig


@dataclass(frozen=True)
class BuiltEngine:
    """Everything that `ArchonEngine.initialize` builds.

    Attributes:
        model: the model, or this rank's stages of a pipeline.
        lora_sizes: matrix sizes of each LoRA by name; the name is None in a model with one LoRA.
        lora_dropouts: the dropout of each LoRA by name, for exports.
        loras: the trainers of a multi-LoRA model by name.
        optimizer: the optimizer; None without one and in a multi-LoRA model.
        scheduler: the learning-rate schedule of `optimizer`.
        stepper: steps `optimizer` inside the backward pass; None to step after it.
        share_prefixes: whether the model computes shared prefixes once.
        sort_documents: whether the model computes documents by length.
        swaps_weights: whether modules have other tensors than the parameters while they run.
        originals: this rank's shards of saved modules before training, in the compute dtype.
    """

    spec: ModelSpec
    args: BaseModelArgs
    adapter: BaseStateDictAdapter
    device: torch.device
    layout: ResolvedLayout
    ranks: Ranks
    model: BaseArchonModel | StagedModel
    builder: ModelBuilder
    lora_sizes: Mapping[str | None, dict[str, LoRASize]]
    lora_dropouts: Mapping[str | None, float]
    loras: dict[str, LoRATrainer]
    optimizer: Optimizer | None
    scheduler: LRSchedule | None
    stepper: StepInBackward | None
    runner: MicroBatchRunner | PipelineRunner
    share_prefixes: bool
    sort_documents: bool
    swaps_weights: bool
    originals: dict[str, Tensor]


def build_engine(config: EngineConfig, total_steps: int | None) -> BuiltEngine:
    """Check a configuration before memory is allocated; then build, parallelize and load the model."""
    # 1. Resolve device, model family and layout, and check that they fit together.
    device = resolve_device(config.device)
    loaded = load_spec(
        config.path, is_critic=config.is_critic, init_score=bool(config.init_score), text_only=config.vision == "off"
    )
    spec, adapter = loaded.spec, with_mtp_layers(config, loaded.adapter)
    args = replace(adapter.args, **model_options(config, spec))
    check_model(config, spec, args, device)
    layout = resolve_layout(config, args.sizes, device.type, supports_gathered=supports_gathered(config.attn_type))
    dims = layout.dims
    sizes, saved = _resolve_loras(config, layout, total_steps, adapter)
    lora_names = tuple(name for name in sizes if name is not None)
    builder = ModelBuilder(config, spec, args, layout, device, sizes, saved)
    backend = resolve_backend(config.attn_type, device, builder.compute_dtype)
    require_delta_rule(config.delta_rule, device, builder.compute_dtype)
    if config.optimizer and not lora_names:
        check_schedule(config.scheduler, total_steps)

    # 2. Join the other ranks.
    join_process_group(dims.world_size, device.type, config.timeout_s)
    require_same_engine(config, total_steps)
    if not config.init_from_scratch:
        require_shapes(config.path, adapter)
    if config.deterministic:
        if device.type == "cuda":  # cuBLAS reads the variable when it creates its first handle
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    ranks = Ranks.from_dims(dims)

    # 3. Build the model on the meta device, shard it and allocate its memory.
    builder = replace(builder, config=resolve_auto(config, spec, args, sizes, device, builder.saved_modules))
    planner = ForwardPlanner(
        ranks,
        device,
        layout.context_parallel,
        config.attn_type,
        is_critic=config.is_critic,
        repeats_first=config.fp8_recipe == "tensorwise",
        lora_names=lora_names,
        image_format=args.image_format,
        n_mtp_layers=args.n_mtp_layers,
    )
    model: BaseArchonModel | StagedModel
    runner: MicroBatchRunner | PipelineRunner
    if dims.pp_enabled:
        model = staged = builder.build_stages(ranks.pp.rank)
        pipeline = Pipeline(staged, ranks.pp, device, builder.compute_dtype, args.dim)
        runner = PipelineRunner(staged, planner, pipeline)
    else:
        model = whole = builder.build_model()
        runner = MicroBatchRunner(whole, planner, RouterLoad(whole), config.router_aux_loss_coef)
    if dims.world_size > 1:
        limit_collectives(config.timeout_s)

    # 4. Load the weights. A dry run has no weights to read, and only the sizes of the folder's LoRAs.
    builder.load_weights(model, adapter)
    originals = copy_originals(model, builder.compute_dtype) if builder.saved_modules else {}
    _load_loras(config, model, adapter, sizes)

    # 5. Make the optimizers: one per LoRA of a multi-LoRA model.
    loras = {name: LoRATrainer(name, model, sizes[name], config, total_steps) for name in lora_names}
    optimizer = scheduler = stepper = None
    if config.optimizer is not None and not loras:
        compiled = compile_enabled(config.compile, next(model.parameters()).device.type)
        optimizer = build_optimizer(
            model,
            config.optimizer,
            compiled=compiled,
            group=stage_group(dims) if config.optimizer.kind == "muon" else SOLO,
        )
        scheduler = LRSchedule(optimizer, config.optimizer.lr, config.scheduler, total_steps)
        stepper = StepInBackward(optimizer) if config.gradient_reduction == "step_in_backward" else None

    # Gathered keys are the keys of whole documents, and a rounded sum of gradients is not the sum of rounded gradients.
    gathers_keys = dims.cp_enabled and layout.context_parallel == "allgather"
    can_share = backend.supports_prefixed and args.shares_prefixes and not gathers_keys and config.fp8 == "none"
    can_share = can_share and not args.n_mtp_layers  # the tokens after a shared prefix differ
    return BuiltEngine(
        spec,
        args,
        adapter,
        device,
        layout,
        ranks,
        model,
        builder,
        sizes,
        {name: lora_dropout(shape) for name, shape in lora_specs(config).items()},
        loras,
        optimizer,
        scheduler,
        stepper,
        runner,
        config.share_prefixes and can_share,
        backend.prefers_equal_lengths,
        is_sharded(model) or has_mixed_precision(model),
        originals,
    )


def _resolve_loras(
    config: EngineConfig, layout: ResolvedLayout, total_steps: int | None, adapter: BaseStateDictAdapter
) -> tuple[dict[str | None, dict[str, LoRASize]], tuple[str, ...]]:
    """Return the matrix sizes of each LoRA by name, and the saved modules of the only one, after checking them."""
    sizes = {name: lora_sizes(adapter, shape) for name, shape in lora_specs(config).items()}
    saved = {name: saved_modules(adapter, shape, sizes[name]) for name, shape in lora_specs(config).items()}
    for name, matrices in sizes.items():
        check_stages(layout, matrices, saved[name])
    check_loras(config, layout, total_steps, adapter, sizes, saved)
    if config.lora is not None:
        for name, matrices in sizes.items():
            check_quantized_base(config.lora.quantize_base, adapter, matrices, saved[name])
    return sizes, saved.get(None, ())


def _load_loras(
    config: EngineConfig,
    model: BaseArchonModel | StagedModel,
    adapter: BaseStateDictAdapter,
    sizes: Mapping[str | None, dict[str, LoRASize]],
) -> None:
    """Load the LoRAs that the configuration names by path."""
    for name, shape in lora_specs(config).items():
        if shape.path is not None and not config.init_from_scratch:
            load_lora(shape.path, model, adapter, sizes[name], name)
