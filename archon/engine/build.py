"""Build a model from a configuration: create it on meta, prune it to a stage, parallelize and load it."""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from archon.checkpoint.hf_io import load_spec, materialize
from archon.checkpoint.hf_reader import HFCheckpoint, load_hf_weights
from archon.checkpoint.peft.reader import read_peft_config, read_saved_modules, read_sizes
from archon.checkpoint.peft.writer import require_writable
from archon.engine.threads import use_all_threads
from archon.models.args.base import BaseModelArgs
from archon.models.base import BaseArchonModel
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.layers.moe import GroupedExperts, expert_biases
from archon.models.lora.model import Fill, add_lora, initialize_magnitudes, initializers
from archon.models.lora.quantized_base import NF4_BLOCK, BaseFormat, is_quantizable, quantize_base
from archon.models.lora.saved_modules import resolve_saved_modules, train_saved_modules
from archon.models.lora.targets import VISION_PREFIX, LoRASize, resolve_lora_sizes
from archon.models.spec import ModelSpec
from archon.parallel.compile import compile_enabled
from archon.parallel.fsdp import local_region, local_tensor, sum_gradients
from archon.parallel.layout import parse_layout
from archon.parallel.pipeline import StagedModel, prune
from archon.parallel.process_group import assign_gpu, torchrun_world_size
from archon.parallel.resolve import ResolvedLayout
from archon.schema.config import EngineConfig, LoRASpec
from archon.schema.errors import ConfigError, FamilyError, LayoutError

FP8_CAPABILITY = (9, 0)
"""Compute capability that the FP8 kernels with row scales and of experts need."""


@dataclass(frozen=True)
class ModelBuilder:
    """Builder of a model from its configuration and resolved layout.

    Attributes:
        loras: the matrix sizes of each LoRA by name; the name is None in a model with one LoRA.
        saved_modules: the parameters trained whole next to the LoRA.
    """

    config: EngineConfig
    spec: ModelSpec
    args: BaseModelArgs
    layout: ResolvedLayout
    device: torch.device
    loras: Mapping[str | None, Mapping[str, LoRASize]] = field(default_factory=dict)
    saved_modules: tuple[str, ...] = ()

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the computation."""
        return getattr(torch, self.config.dtype)

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of the weights: float32 or wider for training, else the compute dtype."""
        trained = self.config.optimizer and not self.loras
        return torch.promote_types(self.compute_dtype, torch.float32) if trained else self.compute_dtype

    def full_model(self) -> BaseArchonModel:
        """Return the unparallelized model on the meta device; its base weights are frozen if it has LoRAs."""
        with torch.device("meta"):
            model = self.spec.model_class(self.args).to(self.master_dtype)
            if self.args.image_format is not None and self.config.vision == "frozen":
                model.visual.requires_grad_(False)
            for lora_name, sizes in self.loras.items():
                add_lora(model, sizes, torch.promote_types(self.compute_dtype, torch.float32), lora_name)
            train_saved_modules(model, self.saved_modules, torch.promote_types(self.compute_dtype, torch.float32))
        return model

    def build_model(self, remove: Callable[[BaseArchonModel], None] = lambda model: None) -> BaseArchonModel:
        """Return the materialized model with undefined weights; `remove` prunes it to a pipeline stage."""
        config, blocks = self.config, self.config.fp8_blocks(self.args.n_layers)
        if config.deterministic or compile_enabled(config.compile, self.device.type):  # both fix a thread count
            use_all_threads()
        model = self.full_model()
        remove(model)
        model.untie_weights()
        if config.lora is not None and config.lora.quantize_base != "none":
            quantize_base(model.layers, config.lora.quantize_base)
        fp8: dict[str, Any] = {"fp8": config.fp8_recipe} if blocks else {}
        if 0 < len(blocks) < self.args.n_layers:
            fp8["fp8_blocks"] = blocks
        self._require_options(fp8)
        reduce_dtype = torch.promote_types(self.compute_dtype, torch.float32)
        parallelized = self.spec.parallelize_fn(
            model,
            self.layout.dims,
            param_dtype=self.compute_dtype,
            reduce_dtype=reduce_dtype,
            cpu_offload=config.cpu_offload,
            reshard_after_forward_policy=config.reshard_after_forward,
            ac_config=config.activation_checkpoint,
            enable_compile=compile_enabled(config.compile, self.device.type),
            **fp8,
        )
        function = f"the parallelize function of family {self.spec.name}"
        if parallelized is not model:
            raise FamilyError(f"{function} returned {type(parallelized).__name__}; return the model that it got")
        sum_gradients(model, self.layout.dims, self.compute_dtype, reduce_dtype, function)
        # FSDP needs the parameters that it offloads on the CPU from the start.
        materialize(model, "cpu" if config.cpu_offload else self.device, self.device)
        return model

    def _require_options(self, options: Iterable[str]) -> None:
        """Raise ConfigError for options that the parallelize function of a family outside archon does not accept."""
        parameters = inspect.signature(self.spec.parallelize_fn).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return
        for name in options:
            if name not in parameters:
                raise ConfigError(
                    f"fp8 = {self.config.fp8} needs the argument {name} of the parallelize function, and family "
                    f"{self.spec.name}'s lacks it; set fp8 to none"
                )

    def build_stages(self, rank: int) -> StagedModel:
        """Return the stages of a pipeline rank, pruned by the family's `pipelining_fn` or by `prune`."""
        plan, remove = self.layout.stages, self.spec.pipelining_fn or prune
        assert plan is not None
        return StagedModel(
            plan, {stage: self.build_model(partial(remove, plan=plan, stage=stage)) for stage in plan.rank_stages(rank)}
        )

    def load_weights(self, model: BaseArchonModel | StagedModel, adapter: BaseStateDictAdapter) -> None:
        """Initialize fresh weights (all of them, or a new score head); load the other weights."""
        gpus = [self.device] if self.device.type == "cuda" else []
        if self.config.init_from_scratch or adapter.init_score:
            with torch.random.fork_rng(devices=gpus), warnings.catch_warnings():
                # DTensor warns that CPU ranks may draw different numbers; here every rank draws all of them.
                warnings.filterwarnings("ignore", message="DTensor random operators")
                torch.manual_seed(self.config.seed)
                weights = replace(self, loras={}, saved_modules=()).full_model().initial_weights()
                self._init_weights(model, weights, adapter.is_tied)
        if not self.config.init_from_scratch:
            load_hf_weights(model, adapter, self.config.path)
        for lora_name, shape in lora_specs(self.config).items():
            with torch.random.fork_rng(devices=gpus):
                torch.manual_seed(shape.seed)
                self._init_weights(model, initializers(self.full_model(), shape.init, lora_name), tied=False)
        initialize_magnitudes(model, self.compute_dtype)

    @torch.no_grad()
    def _init_weights(self, model: BaseArchonModel | StagedModel, fills: Iterable[Fill], tied: bool) -> None:
        """Initialize weights independently of the layout: every rank draws whole tensors and keeps its shards."""
        shapes = dict(self.full_model().named_parameters(remove_duplicate=False))
        parameters = dict(model.named_parameters())
        for name, fill in fills:
            drawn = torch.empty(shapes[name].shape, dtype=shapes[name].dtype)
            fill(drawn)
            aliases = {name, "tok_embeddings.weight"} if name == "output.weight" and tied else {name}
            for parameter in (parameters[alias].detach() for alias in aliases & parameters.keys()):
                local_tensor(parameter).copy_(drawn[local_region(parameter)])


def lora_specs(config: EngineConfig) -> Mapping[str | None, LoRASpec]:
    """Return the configured LoRAs by name; the name is None in a model with one LoRA."""
    if config.lora is None:
        return {}
    return {None: config.lora} if config.lora.loras is None else dict(config.lora.loras.items())


def model_options(config: EngineConfig, spec: ModelSpec) -> dict[str, Any]:
    """Return the model arguments that the engine's configuration sets.

    Raises:
        ConfigError: `delta_rule` selects a kernel, and the family has no gated delta net.
    """
    options: dict[str, Any] = {"attn_type": config.attn_type, "balance_by_bias": bool(config.router_bias_update_rate)}
    if config.delta_rule == "torch":
        return options
    if not hasattr(spec.model_args_class, "delta_rule"):
        raise ConfigError(
            f"delta_rule = {config.delta_rule!r} computes gated delta nets, and family {spec.name} has none; set it to "
            "torch"
        )
    return options | {"delta_rule": config.delta_rule}


def with_mtp_layers(config: EngineConfig, adapter: BaseStateDictAdapter) -> BaseStateDictAdapter:
    """Return the adapter with the MTP layers of the checkpoint if the configuration trains them."""
    if not config.mtp_loss_weight:
        return adapter
    if config.init_from_scratch:
        return adapter.with_mtp(None)
    with HFCheckpoint(config.path) as checkpoint:
        return adapter.with_mtp(checkpoint.entries.keys())


def check_model(config: EngineConfig, spec: ModelSpec, args: BaseModelArgs, device: torch.device) -> None:
    """Raise ConfigError for options that the model or the device does not support."""
    sparse = [layer.feed_forward for layer in args.layer_specs if layer.feed_forward.n_experts]
    if config.router_bias_update_rate and not sparse:
        raise ConfigError(
            f"router_bias_update_rate = {config.router_bias_update_rate:g} balances experts, and family {spec.name} "
            "has none; set it to 0"
        )
    if config.router_aux_loss_coef and not all(network.has_balancing_loss for network in sparse):
        raise ConfigError(
            f"router_aux_loss_coef = {config.router_aux_loss_coef:g} needs softmax routers, and family {spec.name} has "
            "routers with scores that do not sum to 1; set it to 0, and router_bias_update_rate to balance "
            "experts by a bias"
        )
    if config.vision == "trained" and args.image_format is None:
        raise ConfigError(f"vision = 'trained' trains a vision encoder, and family {spec.name} has none; leave it out")
    check_fp8(config, args, device)


def check_quantized_base(
    format: BaseFormat | Literal["none"],
    adapter: BaseStateDictAdapter,
    sizes: Mapping[str, LoRASize],
    saved: Collection[str],
) -> None:
    """Raise ConfigError if the base has no layer to quantize, or has experts, or if a LoRA needs whole weights."""
    if format == "none":
        return
    has = f"lora.quantize_base is {format}, and"
    with torch.device("meta"):
        model = adapter.model_class(adapter.args).requires_grad_(False)
    if any(isinstance(module, GroupedExperts) for module in model.modules()):
        raise ConfigError(
            f"{has} this model has experts, which hold most of its weights and are not quantized; set it to none"
        )
    if any(size.dora for size in sizes.values()):
        raise ConfigError(
            f"{has} DoRA divides by the norms of the whole weights; set dora to false, or quantize_base to none"
        )
    layers = {f"layers.{name}.weight": module for name, module in model.layers.named_modules()}
    if not any(is_quantizable(m, format) for name, m in layers.items() if name not in saved):
        raise ConfigError(
            f"{has} no linear layer of this model can be stored so: nf4 needs input features that are a multiple of "
            f"{NF4_BLOCK}; set it to fp8 or none"
        )


def check_fp8(config: EngineConfig, args: BaseModelArgs, device: torch.device) -> None:
    """Raise ConfigError if a GPU lacks FP8 or torchao, or if padding with an image would change a scale."""
    if not config.fp8_blocks(args.n_layers):
        return
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise ConfigError(
            f"fp8 = {config.fp8} needs a GPU of compute capability 9.0 or higher, such as an H100, and {device} is a "
            f"{torch.cuda.get_device_name(device)}; set fp8 to none"
        )
    if device.type == "cuda":
        try:
            importlib.import_module("archon.models.layers.torchao_fp8")
        except ImportError as error:
            raise ConfigError(
                f"fp8 = {config.fp8} needs torchao on a GPU, and it cannot be imported ({error}): pip install "
                "'archon-engine[fp8]', or set fp8 to none"
            ) from error
    layout = parse_layout(config.layout)
    if config.fp8_recipe == "tensorwise" and args.image_format is not None and layout.world_size > layout.dp:
        raise ConfigError(
            f"fp8 = {config.fp8} pads documents of layout {config.layout} with the first token of a micro-batch, and "
            "it may be an image token; set fp8 = rowwise, vision = off, or use a layout of d and r only"
        )


def check_stages(layout: ResolvedLayout, loras: Mapping[str, LoRASize], saved_modules: Collection[str] = ()) -> None:
    """Raise LayoutError for a pipeline stage without a LoRA matrix or a saved module, which has nothing to train."""
    if not loras or layout.stages is None:
        return
    # layers.3.attention.wq.weight; the matrices of a vision encoder are on the first stage
    last = layout.stages.layers[-1][1] - 1
    adapted = {_layer_of(name, last) for name in (*loras, *saved_modules)}
    for stage, (first, after) in enumerate(layout.stages.layers):
        if not adapted & {*range(first, after)}:
            raise LayoutError(
                f"stage {stage} of the pipeline, layers {first} to {after - 1}, has no LoRA to train: the LoRA "
                f"matrices are in layers {sorted(adapted)}; name targets in every stage, or use a smaller p"
            )


def _layer_of(name: str, last: int) -> int:
    """Return the layer of a parameter; the embedding and the vision encoder count as a part of the first layer."""
    if name.startswith(VISION_PREFIX) or name == "tok_embeddings.weight":
        return 0
    return int(name.split(".")[1]) if name.startswith("layers.") else last


def lora_sizes(adapter: BaseStateDictAdapter, config: LoRASpec) -> dict[str, LoRASize]:
    """Return the sizes of a fresh LoRA, or the sizes in the folder `config.path`."""
    sizes = resolve_lora_sizes(adapter, config) if config.path is None else read_sizes(config.path, adapter)
    dropout = lora_dropout(config)
    return {name: replace(size, dropout=dropout) for name, size in sizes.items()}


def saved_modules(adapter: BaseStateDictAdapter, config: LoRASpec, sizes: Mapping[str, LoRASize]) -> tuple[str, ...]:
    """Return the parameters of `modules_to_save` of a fresh LoRA, or those in the folder `config.path`."""
    if config.path is None:
        return resolve_saved_modules(adapter, config.modules_to_save, sizes)
    return read_saved_modules(config.path, adapter)


def lora_dropout(config: LoRASpec) -> float:
    """Return the configured dropout, or else the dropout of the folder `config.path`."""
    if config.dropout is None:
        return 0.0 if config.path is None else read_peft_config(config.path).dropout
    return config.dropout


def require_exportable(config: EngineConfig, name: str) -> None:
    """Raise ConfigError if the export at the end of a run would lose balancing biases or LoRA matrices.

    Some families store router biases in their checkpoints; the others cannot export updated biases.

    Args:
        config: the engine's configuration.
        name: the section of the run's configuration that holds `config`.
    """
    loaded = load_spec(config.path, is_critic=config.is_critic, text_only=config.vision == "off")
    spec, adapter = loaded.spec, loaded.adapter
    for shape in lora_specs(config).values():
        require_writable(adapter, lora_sizes(adapter, shape), shape.export_experts)
    if not config.router_bias_update_rate:
        return
    with torch.device("meta"):
        moved = expert_biases(spec.model_class(replace(adapter.args, balance_by_bias=True)))
    if moved.keys() - adapter.buffer_shapes.keys():
        raise ConfigError(
            f"{name}.router_bias_update_rate = {config.router_bias_update_rate:g} moves balancing biases, and "
            f"an exported {spec.name} cannot hold them; set it to 0, and {name}.router_aux_loss_coef to balance "
            "experts by a loss"
        )


def resolve_device(name: str) -> torch.device:
    """Return the named device; `auto` is a GPU if one exists.

    Raises:
        ConfigError: the name is unknown or the device does not exist.
    """
    if name == "auto":
        return assign_gpu() if torch.cuda.is_available() else torch.device("cpu")
    if re.fullmatch(r"cpu|cuda(:(0|[1-9][0-9]{0,3}))?", name) is None:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r} was requested, but PyTorch sees {torch.cuda.device_count()} CUDA devices")
    if device.type == "cuda" and torchrun_world_size() > 1:
        if name != "cuda":
            raise ConfigError(f"device {name!r} names one GPU for several processes; set device to cuda")
        return assign_gpu()
    return device
