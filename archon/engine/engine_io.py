"""Initialized state of an engine, and its weights, exports, checkpoints and offloading."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from archon.checkpoint.hf_export import require_zero_expert_biases, save_hf_distributed
from archon.checkpoint.hf_io import checkpoint_digest
from archon.checkpoint.hf_reader import load_hf_weights
from archon.checkpoint.native import find_checkpoint, model_fingerprint, open_state
from archon.checkpoint.peft.reader import load_lora, read_sizes
from archon.checkpoint.peft.writer import save_lora
from archon.checkpoint.saver import Saver
from archon.checkpoint.state_tree import PerRank, read_all
from archon.checkpoint.tokenizer import save_run_tokenizer
from archon.engine.build import lora_specs
from archon.engine.initialize import BuiltEngine
from archon.engine.lora import LoRATrainer
from archon.engine.optim import LRSchedule, SkippedSteps
from archon.engine.state import (
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    rng_state,
    set_rng_state,
)
from archon.models.args.base import BaseModelArgs
from archon.models.base import BaseArchonModel
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.layers.moe import expert_biases
from archon.models.lora.model import is_lora, merge_lora_weights
from archon.models.lora.quantized_base import BaseWeights
from archon.models.lora.saved_modules import trained_modules
from archon.models.lora.targets import LoRASize
from archon.models.spec import ModelSpec
from archon.parallel.control_plane import ControlPlane
from archon.parallel.dims import ArchonParallelDims
from archon.parallel.fsdp import local_tensor
from archon.parallel.gather import BUCKET_BYTES, full_tensors, full_tensors_across_stages
from archon.parallel.pipeline import StagedModel
from archon.parallel.ranks import Ranks
from archon.parallel.resolve import ResolvedLayout
from archon.schema.config import EngineConfig
from archon.schema.errors import CheckpointError, ConfigError

SaveFormat = Literal["hf", "native", "peft"]


class EngineIO:
    """State of an engine, with its weights, exports and checkpoints.

    Attributes:
        config: the configuration.
        version: version of the weights; the caller counts it, the engine saves it with them.
        step: calls of `train_batch` so far.
        saver: writes native checkpoints.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.version = 0
        self.step = 0
        self.saver = Saver()
        self._built: BuiltEngine | None = None
        self._loaded_from: str | os.PathLike[str] | None = None if config.init_from_scratch else config.path
        """The Hugging Face checkpoint of the weights; an export copies its passthrough tensors."""
        self._digest: tuple[str, str] | None = None
        self._skips = SkippedSteps()
        self._offloaded = False
        self._stepped: tuple[str, ...] = ()
        """The LoRAs trained by the last `train_batch`, until `step_lr_scheduler`."""
        # True during a sharded model's forward and backward: an error there leaves gathered weights and gradients that
        # nothing clears, and further training would be silently wrong.
        self._failed_mid_step = False

    @property
    def built(self) -> BuiltEngine:
        """Everything that `initialize` built; raises ConfigError before it."""
        if self._built is None:
            raise ConfigError("the engine is not initialized; call initialize() first")
        return self._built

    @property
    def model(self) -> BaseArchonModel | StagedModel:
        """The model, or this rank's stages of a pipeline."""
        return self.built.model

    @property
    def spec(self) -> ModelSpec:
        """The model family."""
        return self.built.spec

    @property
    def args(self) -> BaseModelArgs:
        """The model arguments."""
        return self.built.args

    @property
    def adapter(self) -> BaseStateDictAdapter:
        """The state-dict adapter of the checkpoint."""
        return self.built.adapter

    @property
    def device(self) -> torch.device:
        """The device of the computation."""
        return self.built.device

    @property
    def layout(self) -> ResolvedLayout:
        """The resolved layout."""
        return self.built.layout

    @property
    def parallel_dims(self) -> ArchonParallelDims:
        """Degrees and meshes of the layout."""
        return self.built.layout.dims

    @property
    def ranks(self) -> Ranks:
        """The ranks of the layout's dimensions."""
        return self.built.ranks

    @property
    def lora(self) -> Mapping[str, LoRASize]:
        """The matrix sizes of the only LoRA; empty without a LoRA and in a multi-LoRA model."""
        return self.built.lora_sizes.get(None, {})

    @property
    def loras(self) -> dict[str, LoRATrainer]:
        """The LoRAs of a multi-LoRA model by name."""
        return self.built.loras

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; None without one and in a multi-LoRA model."""
        return self.built.optimizer

    @property
    def scheduler(self) -> LRSchedule | None:
        """The learning-rate schedule of `optimizer`."""
        return self.built.scheduler

    @property
    def full_model(self) -> BaseArchonModel:
        """The model, if this rank holds all of its layers; raises ConfigError in a pipeline."""
        if not isinstance(self.model, BaseArchonModel):
            raise ConfigError(f"layout {self.config.layout}: a pipeline rank holds only some of the model's layers")
        return self.model

    def meta_model(self) -> BaseArchonModel:
        """Return the unparallelized model with all layers and LoRAs on the meta device."""
        return self.built.builder.full_model()

    # Weights

    def weights(
        self, bucket_bytes: int = BUCKET_BYTES, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (native name, whole tensor) of every parameter, tied ones once, and of every balancing bias.

        Tensors have the master dtype. The only LoRA is merged into copies of its matrices; multi-LoRA is not merged.

        Args:
            bucket_bytes: sharded tensors are gathered in buckets of this size, at least one tensor each.
            dtype: the dtype of the export. Parameters are widened to it before a LoRA is merged, so that sums are not
                rounded twice.
        """
        weights = self.base_weights(bucket_bytes)
        if not self.lora:
            yield from weights
            return
        if dtype is None:
            saved, master = {*self.built.builder.saved_modules}, self.built.builder.master_dtype
            weights = ((name, x.to(master) if name in saved else x) for name, x in weights)
        else:
            biases, wide = self.adapter.buffer_shapes, dtype
            weights = ((name, x if name in biases else x.to(torch.promote_types(x.dtype, wide))) for name, x in weights)
        yield from merge_lora_weights(weights, dict(self.lora_weights()), self.lora)

    def base_weights(self, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
        """Yield `weights` without LoRAs; weights are not copied if this rank holds them whole.

        Saved modules have their trained values, in the dtype of training. Weights of a quantized base are dequantized.
        """
        local = BaseWeights(self.model, self.built.builder.compute_dtype)
        biases = expert_biases(self.model)
        if not isinstance(self.model, StagedModel):
            yield from full_tensors(local.items(), bucket_bytes)
            yield from biases.items()
            return
        # Ranks of a pipeline list the tensors of other stages by a model on the meta device.
        full_model, stages, device = self.meta_model(), self.ranks.pp, self.device
        parameters = dict(full_model.named_parameters())
        # A tied head is not stored, since it is the embedding.
        like = {name: parameters[name] for name in self.adapter.native_shapes}
        yield from full_tensors_across_stages(local, like, stages, device, bucket_bytes)
        wide = torch.promote_types(self.built.builder.master_dtype, torch.float32)
        all_biases = {name: bias.to(wide) for name, bias in expert_biases(full_model).items()}
        yield from full_tensors_across_stages(biases, all_biases, stages, device, bucket_bytes)

    def lora_weights(self, lora_name: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (native name, whole tensor) of every LoRA matrix a and b.

        With `lora_name` it yields one LoRA of a multi-LoRA model, named as in a model with only this LoRA.
        """
        names = None if lora_name is None else self._lora_trainer(lora_name).names

        def selected(model: nn.Module) -> dict[str, nn.Parameter]:
            is_selected = is_lora if names is None else names.__contains__
            return {name: parameter for name, parameter in model.named_parameters() if is_selected(name)}

        for name, tensor in self._whole(selected):
            yield name if names is None else names[name], tensor

    def saved_modules(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (native name, whole tensor) of the weights trained next to the LoRA: saved modules, a value head."""
        return self._whole(trained_modules)

    def _whole(self, select: Callable[[nn.Module], Mapping[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) of the parameters that `select` chooses from a model."""
        if not isinstance(self.model, StagedModel):
            return full_tensors(select(self.model).items())
        return full_tensors_across_stages(select(self.model), select(self.meta_model()), self.ranks.pp, self.device)

    def hf_weights(self, dtype: torch.dtype | None = None, bucket_bytes: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, tensor) for an export in `dtype`; see `weights`.

        Raises:
            CheckpointError: on every rank, if a balancing bias that the family's checkpoints lack is not 0.
        """
        require_zero_expert_biases(self.model, self.adapter, self.ranks.pp)
        stored = self.adapter.stored_shapes
        weights = self.weights(bucket_bytes, dtype=dtype)
        yield from self.adapter.export((name, x) for name, x in weights if name in stored)

    def load_lora(self, lora_name: str, path: str | os.PathLike[str]) -> None:
        """Load one LoRA of a multi-LoRA model from a PEFT folder; its optimizer and schedule stay.

        Every rank calls it.

        Raises:
            CheckpointError: the LoRA in the folder has other sizes.
        """
        lora = self._lora_trainer(lora_name)
        if read_sizes(path, self.adapter) != lora.sizes:
            raise CheckpointError(
                f"{os.fspath(path)} has other matrices, ranks or alphas than LoRA {lora_name!r} of this run; "
                f"expected the values of lora.loras.{lora_name}"
            )
        load_lora(path, self.model, self.adapter, lora.sizes, lora_name)

    def _lora_trainer(self, lora_name: str) -> LoRATrainer:
        if lora_name not in self.loras:
            raise ConfigError(f"unknown LoRA {lora_name!r}; this model has {', '.join(self.loras) or 'no named LoRA'}")
        return self.loras[lora_name]

    # Checkpoints

    @property
    def _base(self) -> str:
        """The checkpoint of the frozen base weights."""
        return os.fspath(self._loaded_from or self.config.path)

    @property
    def export_format(self) -> SaveFormat:
        """The export format at the end of a run: `peft` for a model with LoRAs, else `hf`."""
        return "hf" if self.config.lora is None else "peft"

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Model, LoRA sizes and hash of the base; a native checkpoint loads only if they are equal."""
        model, lora_sizes = model_fingerprint(self.args), self.built.lora_sizes
        if not lora_sizes:
            return model
        described: dict[str | None, Any] = {
            name: {matrix: _fingerprint(size) for matrix, size in sizes.items()} for name, sizes in lora_sizes.items()
        }
        # The digest is read once for a base: a save must not wait for the heads of its tensors.
        if self._digest is None or self._digest[0] != self._base:
            self._digest = self._base, checkpoint_digest(self._base)
        sizes = described.get(None, described)  # the only LoRA has no name
        saved = sorted(self.built.builder.saved_modules)
        if self.config.lora is not None and self.config.lora.quantize_base != "none":
            model = {**model, "quantize_base": self.config.lora.quantize_base}
        return {**model, "adapters": sizes, **({"modules_to_save": saved} if saved else {}), "base": self._digest[1]}

    def save(
        self,
        path: str | os.PathLike[str],
        format: SaveFormat = "hf",
        asynchronous: bool = False,
        dtype: torch.dtype | None = None,
        lora: str | None = None,
        tokenizer: Any = None,
    ) -> None:
        """Write the weights or the whole state; every rank calls it.

        Args:
            path: the folder.
            format: `hf` exports a Hugging Face checkpoint from any layout: shards, index, config and tokenizer. Rank 0
                writes it, one shard in memory at a time, with a LoRA merged. `peft` exports LoRAs alone in PEFT's
                format; each LoRA of a multi-LoRA model gets a folder of its name. `native` saves this engine's state
                below `path` (see `archon.checkpoint.native`): each rank writes its part, and any layout can load it.
            asynchronous: for `native`, copy to the CPU and write in the background. The next save or `wait_for_saves`
                raises errors.
            dtype: the dtype of an `hf` export; by default `export_dtype` of the configuration.
            lora: the LoRA of a multi-LoRA model that a `peft` export writes to `path` itself.
            tokenizer: the tokenizer to write, or its folder; by default the checkpoint's for `hf`, and none otherwise.
        """
        if lora is not None and format != "peft":
            raise ConfigError(f"lora={lora!r} selects a LoRA for format='peft', and format is {format!r}")
        if format == "native":
            if dtype is not None:
                raise ConfigError(f"format='native' keeps every dtype; dtype={dtype} belongs to format='hf'")
            state = {"engine": self.state_dict()}
            if tokenizer is not None:
                plane = ControlPlane.with_long_timeout("exports")
                plane.main_first(lambda: save_run_tokenizer(Path(path), tokenizer, self.config.path))
            self.saver.save(path, self.step, state, None, self.fingerprint, asynchronous=asynchronous)
            return
        if format not in ("hf", "peft"):
            raise ConfigError(f"format must be 'hf', 'peft' or 'native', got {format!r} ('dcp' is now 'native')")
        if asynchronous:
            raise ConfigError("asynchronous=True needs format='native'; an 'hf' export is written before save returns")
        if format == "peft":
            self._save_loras(path, lora, tokenizer)
            return
        if self.loras:
            raise ConfigError(
                f"format='hf' merges a LoRA into the weights, and this model has {len(self.loras)} LoRAs; export them "
                "with format='peft', and merge one with archon export"
            )
        if dtype is None and self.config.export_dtype != "checkpoint":
            dtype = getattr(torch, self.config.export_dtype)
        save_hf_distributed(
            path,
            self.hf_weights(dtype or torch.float32),  # a LoRA is merged in float32 for any dtype of the checkpoint
            like=self.config.path,
            tokenizer=tokenizer,
            dtype=dtype or "like",
            passthrough=False if self._loaded_from is None else self._loaded_from,
            text_only=self.config.vision == "off",
            adapter=self.adapter if self.args.n_mtp_layers else None,
        )

    def _save_loras(self, path: str | os.PathLike[str], lora_name: str | None, tokenizer: Any) -> None:
        shapes = lora_specs(self.config)
        if not shapes:
            raise ConfigError("format='peft' writes LoRAs, and this model has none; set lora, or format to 'hf'")
        for name in shapes if lora_name is None else [self._lora_trainer(lora_name).name]:
            folder = path if name is None or lora_name is not None else os.path.join(path, name)
            sizes, experts = self.built.lora_sizes[name], shapes[name].export_experts
            tensors, modules = dict(self.lora_weights(name)), dict(self.saved_modules() if name is None else ())
            options: dict[str, Any] = {"base": self._base, "experts": experts, "tokenizer": tokenizer}
            options["dropout"] = self.built.lora_dropouts.get(name, 0.0)
            save_lora(folder, self.adapter, sizes, tensors, modules, **options)

    def wait_for_saves(self) -> None:
        """Wait until the newest asynchronous save is on disk; raises its error."""
        self.saver.wait()

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load the weights of a checkpoint of the same model; optimizer and schedule stay.

        Every rank calls it. A Hugging Face checkpoint resets balancing biases that it lacks to 0. A native checkpoint
        may have any layout and dtype.
        """
        folder = find_checkpoint(path)
        if folder is None:
            if self.built.builder.saved_modules:
                raise ConfigError(
                    f"{os.fspath(path)}: loading a base would replace the trained modules_to_save; set path to this "
                    "checkpoint and start another run"
                )
            load_hf_weights(self.model, self.adapter, path)
            self._loaded_from = path
            for name, bias in expert_biases(self.model).items():
                if name not in self.adapter.buffer_shapes:
                    bias.zero_()
            return
        with open_state(folder, self.fingerprint) as (_, state):
            load_model_state(self.model, state["engine"]["model"], self._known_names(), any_dtype=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a bitwise resume: weights, moments, schedule, random state, step and version.

        Each rank returns its shards. As in PyTorch, tensors are not copies: store or copy them before the next step.
        """
        self._check_usable()
        state: dict[str, Any] = {
            "model": model_state(self.model),
            "rng": rng_state() if self.parallel_dims.world_size == 1 else PerRank((rng_state(),)),
            "layout": str(self.layout),
            "step": self.step,
            "version": self.version,
        }
        if self.optimizer is not None and self.scheduler is not None:
            state["optimizer"] = optimizer_state(self.model, self.optimizer)
            state["scheduler"] = self.scheduler.state_dict()
            state["skipped_steps"] = self.skipped_steps
        if self.loras:
            state["adapters"] = {name: lora.state_dict(self.model) for name, lora in self.loras.items()}
            state["stepped"] = list(self._stepped)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict` into an initialized engine of the same config.

        A state from a checkpoint may have any layout. Each rank's random generators continue in the same layout; in
        another layout all of them start from rank 0's.

        Raises:
            CheckpointError: the state does not match the engine.
        """
        self._check_usable()
        if (self.optimizer is None) != ("optimizer" not in state):
            has = "has" if "optimizer" in state else "lacks"
            raise CheckpointError(
                f"the checkpoint {has} an optimizer state and this engine does not; was optimizer changed?"
            )
        load_model_state(self.model, state["model"], self._known_names())
        if self.optimizer is not None and self.scheduler is not None:
            load_optimizer_state(self.model, self.optimizer, state["optimizer"], self._known_names())
            self.scheduler.load_state_dict(state["scheduler"])
            self._skips.total = int(state["skipped_steps"])
        for name, lora in self.loras.items():
            lora.load_state_dict(self.model, state["adapters"][name], self._known_names())
        self._stepped = tuple(state.get("stepped", ()))
        self.step, self.version = int(state["step"]), int(state["version"])
        rng = state["rng"]
        if isinstance(rng, PerRank):
            is_same_layout = state.get("layout") == str(self.layout) and len(rng.values) > 1
            rng = rng.values[torch.distributed.get_rank() if is_same_layout else 0]
        set_rng_state(read_all(rng))

    def _known_names(self) -> list[str]:
        """Return the names in a state of the whole pipeline; none if this rank holds all layers."""
        return [] if isinstance(self.model, BaseArchonModel) else list(model_state(self.meta_model()))

    @property
    def skipped_steps(self) -> int:
        """The number of steps skipped because their gradient was not finite."""
        return self._skips.total + sum(lora.skipped_steps for lora in self.loras.values())

    # Offloading

    def offload(self) -> None:
        """Free the device: drop gradients, move parameters and optimizer state to the CPU.

        Until `onload` the engine refuses to run or to save its state.
        """
        self._move(torch.device("cpu"))
        self._offloaded = True

    def onload(self) -> None:
        """Undo `offload`."""
        self._move(self.device)
        self._offloaded = False

    def _move(self, device: torch.device) -> None:
        self.model.zero_grad(set_to_none=True)
        if not self.config.cpu_offload:  # else the parameters are on the CPU anyway
            self.model.to(device)
            originals = self.built.originals
            originals |= {name: original.to(device) for name, original in originals.items()}
        self.model.tie_weights()
        for optimizer in (self.optimizer, *(lora.optimizer for lora in self.loras.values())):
            for parameter, moments in optimizer.state.items() if optimizer is not None else ():
                moments.update({key: x.to(local_tensor(parameter).device) for key, x in moments.items()})
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _check_usable(self) -> None:
        if self._offloaded:
            raise ConfigError("the engine is offloaded; call onload() first")
        if self._failed_mid_step:
            raise ConfigError(
                "an error interrupted an earlier train_batch, and its gradients cannot be undone; "
                "call initialize() and load the last checkpoint"
            )


def _fingerprint(size: LoRASize) -> dict[str, Any]:
    """Return the fields of a size; dropout and dora are left out if off, as in checkpoints of earlier versions."""
    return {name: value for name, value in asdict(size).items() if name not in ("dropout", "dora") or value}
