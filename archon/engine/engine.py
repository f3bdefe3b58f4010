"""ArchonEngine: one model, its optimizer, and the step that trains it. It knows nothing of rewards or rollouts."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from archon.checkpoint.hf_export import require_zero_expert_biases, save_hf_distributed
from archon.checkpoint.hf_io import checkpoint_digest, load_spec
from archon.checkpoint.hf_reader import load_hf_weights
from archon.checkpoint.native import find_checkpoint, model_fingerprint, open_state
from archon.checkpoint.peft.reader import load_lora, read_sizes
from archon.checkpoint.peft.writer import save_lora
from archon.checkpoint.saver import Saver
from archon.checkpoint.state_tree import PerRank, read_all
from archon.engine import heap
from archon.engine.batch import PackedBatch, merge, unpack
from archon.engine.build import (
    ModelBuilder,
    balancing_args,
    check_model,
    check_stages,
    delta_rule,
    lora_sizes,
    lora_specs,
    resolve_device,
    use_deterministic_algorithms,
)
from archon.engine.full_weights import WeightGatherer
from archon.engine.lora import LoRATrainer, check_multi_lora
from archon.engine.loss import LossFn, LossWeightFn
from archon.engine.optim import (
    LRSchedule,
    SkippedSteps,
    build_optimizer,
    check_schedule,
    clip_gradients,
    gradient_norm,
    gradient_norms,
)
from archon.engine.pipeline_step import PipelineRunner
from archon.engine.plan import Batch, ForwardPlanner, MicroBatch, micro_batches
from archon.engine.router_balance import RouterLoad, replay_metrics
from archon.engine.state import (
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    rng_state,
    set_rng_state,
)
from archon.engine.threads import adjust_threads
from archon.engine.train_step import BatchLoss, LossGroup, MicroBatchRunner, lora_groups, total_weight
from archon.engine.watchdog import StallWatchdog
from archon.models.args.base import BaseModelArgs
from archon.models.attention.registry import resolve_backend, supports_gathered
from archon.models.base import BaseArchonModel
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.models.layers.delta_rule import require_delta_rule
from archon.models.layers.moe import expert_biases
from archon.models.layers.routed_experts import check_replay
from archon.models.lora.mapping import NO_LORA
from archon.models.lora.model import disable_lora, is_lora, merge_lora_weights, share_frozen
from archon.models.lora.targets import LoRASize
from archon.parallel.control_plane import ControlPlane
from archon.parallel.dims import ArchonParallelDims
from archon.parallel.fsdp import is_sharded, local_tensor
from archon.parallel.gather import BUCKET_BYTES, full_tensors
from archon.parallel.phase import phase
from archon.parallel.pipeline import StagedModel
from archon.parallel.pipeline_schedule import Pipeline
from archon.parallel.process_group import join_process_group, limit_collectives
from archon.parallel.ranks import Ranks
from archon.parallel.resolve import ResolvedLayout, resolve_layout
from archon.schema.config import EngineConfig, OptimizerConfig
from archon.schema.errors import BatchError, CheckpointError, ConfigError

SaveFormat = Literal["hf", "native", "peft"]


class ArchonEngine:
    """Trains or evaluates one model of a registered family.

    Batches are padded dictionaries (see `archon.engine.batch.pack`) or `PackedBatch`es. Tensors that are returned are
    token-aligned [B, S] on the CPU for a padded batch: index t is about token t, with 0 at first tokens and padding.

        engine = ArchonEngine(EngineConfig(path="Qwen3-0.6B"))
        engine.initialize(total_steps=100)
        for batch in batches:
            metrics = engine.train_batch(batch, CrossEntropyLoss(), loss_token_count)
            engine.step_lr_scheduler()
        engine.save("out")
    """

    model: BaseArchonModel | StagedModel
    args: BaseModelArgs
    adapter: BaseStateDictAdapter
    device: torch.device
    layout: ResolvedLayout
    ranks: Ranks
    lora: Mapping[str, LoRASize]
    """The sizes of the only adapter, by matrix; empty without adapters, and with several, which are in `loras`."""
    loras: dict[str, LoRATrainer]
    optimizer: Optimizer | None
    scheduler: LRSchedule | None

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.version = 0
        """The version of the weights; the caller counts it, the engine saves it with them."""
        self.step = 0
        """Calls of `train_batch` so far."""
        self.saver = Saver()
        self.stall_watch = StallWatchdog(None)
        """Write every rank's stacks to its `folder` when a step takes longer than `config.stall_s`."""
        self._loaded_from: str | os.PathLike[str] | None = None if config.init_from_scratch else config.path
        """The Hugging Face checkpoint of the weights, from which an export copies what the model does not compute."""
        self._digest: tuple[str, str] | None = None
        self._skips = SkippedSteps()
        self._offloaded = False
        # True during a sharded model's forward and backward: an error there leaves gathered weights and gradients that
        # nothing clears, and further training would be silently wrong.
        self._failed_mid_step = False

    if not TYPE_CHECKING:  # a type checker would accept every name as an attribute

        def __getattr__(self, name: str) -> Any:
            """Raise ConfigError for what `initialize` makes, before it was called."""
            if name in type(self).__annotations__:
                raise ConfigError(f"the engine has no {name} yet; call initialize() first")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def initialize(self, total_steps: int | None = None) -> None:
        """Build the model on the meta device, parallelize, materialize and load it; then make optimizer and schedule.

        `total_steps` is where a linear or cosine schedule ends. Configurations are checked before memory is allocated.
        """
        config = self.config
        self.device = resolve_device(config.device)
        loaded = load_spec(
            config.path,
            is_critic=config.is_critic,
            init_score=bool(config.init_score),
            text_only=config.vision == "off",
        )
        spec, self.adapter = loaded.spec, loaded.adapter
        args = replace(
            self.adapter.args, attn_type=config.attn_type, **balancing_args(config), **delta_rule(config, spec)
        )
        check_model(config, spec, args, self.device)
        self.layout = resolve_layout(
            config, args.sizes, self.device.type, supports_gathered=supports_gathered(config.attn_type)
        )
        dims = self.parallel_dims
        sizes = {name: lora_sizes(self.adapter, shape) for name, shape in lora_specs(config).items()}
        for own in sizes.values():
            check_stages(self.layout, own)
        self.lora = sizes.get(None, {})
        lora_names = self._lora_names = tuple(name for name in sizes if name is not None)
        check_multi_lora(config, self.layout, total_steps, sizes)
        build = self._builder = ModelBuilder(config, spec, args, self.layout, self.device, sizes)
        backend = resolve_backend(config.attn_type, self.device, build.compute_dtype)
        require_delta_rule(config.delta_rule, self.device, build.compute_dtype)
        if config.optimizer and not lora_names:
            check_schedule(config.scheduler, total_steps)
        join_process_group(dims.world_size, self.device.type, config.timeout_s)
        if config.deterministic:
            use_deterministic_algorithms(self.device)
        self.ranks = Ranks.from_dims(dims)
        planner = ForwardPlanner(
            self.ranks,
            self.device,
            self.layout.context_parallel,
            config.attn_type,
            is_critic=config.is_critic,
            repeats_first=config.fp8_recipe == "tensorwise",
            lora_names=lora_names,
            image_format=args.image_format,
        )
        self.spec, self.args = spec, args
        shareable = backend.supports_prefixed and args.shares_prefixes
        # Gathered keys are those of whole documents.
        gathers_keys = dims.cp_enabled and self.layout.context_parallel == "allgather"
        # The rounded gradient of a common beginning is not the sum of the rounded ones of its documents.
        self._share_prefixes = config.share_prefixes and shareable and not gathers_keys and config.fp8 == "none"
        self._sort_documents = backend.prefers_equal_lengths
        self._failed_mid_step = False
        self._runner: MicroBatchRunner | PipelineRunner
        if dims.pp_enabled:
            self.model = staged = build.build_stages(self.ranks.pp.rank)
            pipeline = Pipeline(staged, self.ranks.pp, self.device, build.compute_dtype, args.dim)
            self._runner = PipelineRunner(staged, planner, pipeline)
        else:
            self.model = build.build_model()
            load = RouterLoad(self.model)
            self._runner = MicroBatchRunner(self.model, planner, load, config.router_aux_loss_coef)
        if dims.world_size > 1:
            limit_collectives(config.timeout_s)
            if not config.init_from_scratch:
                ControlPlane.world().require_same(config.path, checkpoint_digest(config.path))
        self.stall_watch = StallWatchdog(config.stall_s)
        weakref.finalize(self, self.stall_watch.end)
        self._load_weights(sizes)
        self._is_sharded = is_sharded(self.model)
        self._make_optimizers(sizes, total_steps)

    def _load_weights(self, sizes: Mapping[str | None, dict[str, LoRASize]]) -> None:
        config = self.config
        self._builder.load_weights(self.model, self.adapter)
        for name, shape in lora_specs(config).items():
            # A dry run, whose weights are not read, has the sizes of the folder's adapters alone.
            if shape.path is not None and not config.init_from_scratch:
                load_lora(shape.path, self.model, self.adapter, sizes[name], name)

    def _make_optimizers(self, sizes: Mapping[str | None, dict[str, LoRASize]], total_steps: int | None) -> None:
        config = self.config
        self.loras = {
            name: LoRATrainer(name, self.model, sizes[name], config, total_steps) for name in self._lora_names
        }
        self._stepped: tuple[str, ...] = ()
        """The adapters that the last `train_batch` trained, until `step_lr_scheduler`."""
        self.optimizer = self.scheduler = None
        if config.optimizer is not None and not self.loras:
            self.optimizer = build_optimizer(self.model, config.optimizer)
        if self.optimizer is not None and config.optimizer is not None:
            self.scheduler = LRSchedule(self.optimizer, config.optimizer.lr, config.scheduler, total_steps)

    def share_base(self, owner: ArchonEngine) -> None:
        """Use the frozen weights of an initialized engine in place of equal ones of its own, in the same layout; before
        the first batch. Does nothing unless both have adapters and the same checkpoint."""
        if self.lora and owner.lora and self._base == owner._base:
            share_frozen(self.model, owner.model)

    def meta_model(self) -> BaseArchonModel:
        """Return the model with all layers, and adapters if it has them, unparallelized, on the meta device."""
        return self._builder.full_model()

    @property
    def parallel_dims(self) -> ArchonParallelDims:
        """Degrees and meshes of the layout."""
        return self.layout.dims

    def train_batch(
        self, batch: Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn, temperature: float = 1.0
    ) -> dict[str, float]:
        """Take one optimizer step on Σ loss_fn / Σ loss_weight_fn, both over all micro-batches.

        Returns `loss`, `grad_norm` (before clipping), `lr`, `tokens`, `tokens_computed` (fewer where documents begin
        alike), `micro_batches`, `loss_weight` (the denominator), `skipped` (1 when the gradient was not finite: then no
        weight or moment changed) and the loss function's metrics. With several adapters see `archon.engine.lora`:
        `loss` is the sum of theirs, `lr` the largest, `skipped` how many were, and each has its own as `NAME/loss` and
        so on.
        """
        if self.loras:
            return self._train_loras(batch, loss_fn, loss_weight_fn, temperature)
        optimizer, scheduler, config = self._require_optimizer()
        with self.stall_watch.block():
            metrics = self._accumulate(batch, loss_fn, loss_weight_fn, temperature)
            finite = abs(metrics["grad_norm"]) < float("inf")
            if finite:
                with phase("optimizer"):
                    clip_gradients(self.model.parameters(), metrics["grad_norm"], config.max_grad_norm)
                    optimizer.step()
                if self.config.router_bias_update_rate:
                    for load in self._runner.loads:
                        load.update_biases(self.config.router_bias_update_rate, self.ranks)
            optimizer.zero_grad(set_to_none=True)
            self.step += 1
            self._skips.count(not finite, self.step, config.max_skipped_in_a_row)
            heap.trim_heap_if_grown("training")
            return metrics | {"lr": scheduler.lr, "skipped": float(not finite)}

    def _train_loras(
        self, batch: Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn, temperature: float
    ) -> dict[str, float]:
        """Same as `train_batch`, of several adapters: each that has documents takes a step of its own."""
        if self.config.optimizer is None:
            self._require_optimizer()
        with self.stall_watch.block():
            metrics = self._accumulate(batch, loss_fn, loss_weight_fn, temperature)
            trained = [name for name in self.loras if f"{name}/grad_norm" in metrics]
            self.step += 1
            with phase("optimizer"):
                for name in trained:
                    metrics |= self.loras[name].step(metrics[f"{name}/grad_norm"])
            self._clear_gradients()
            self._stepped = tuple(trained)
            heap.trim_heap_if_grown("training")
            of_all = {key: [metrics[f"{name}/{key}"] for name in trained] for key in ("lr", "skipped")}
            return metrics | {"lr": max(of_all["lr"]), "skipped": sum(of_all["skipped"])}

    def gradients(
        self,
        batch: Batch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        temperature: float = 1.0,
        *,
        full: bool = True,
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Compute the gradients of `train_batch`, before clipping; no weight changes. Every rank calls it.

        Returns the gradients of the parameters in this rank's pipeline stages by name, tied ones once, in the masters'
        dtype: whole tensors, gathered from the ranks that share them, or with `full=False` this rank's, as DTensors
        where they are sharded. Also returns `loss`, `grad_norm`, `tokens`, `micro_batches`, `loss_weight` and the loss
        function's metrics.
        """
        metrics = self._accumulate(batch, loss_fn, loss_weight_fn, temperature)
        grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return dict(full_tensors(grads.items())) if full else grads, metrics

    def _accumulate(
        self, batch: Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn, temperature: float
    ) -> dict[str, float]:
        """Accumulate the batch's gradients in the parameters. Returns the metrics before the optimizer's step."""
        packed, parts = self._split(batch, temperature)
        batch_loss = self._batch_loss(parts, loss_fn, loss_weight_fn, temperature)
        if not self.model.training:
            self.model.train()
        reduce_every = self.config.gradient_reduction == "per_microbatch"
        self._clear_gradients()
        for load in self._runner.loads:
            load.clear()
        self._failed_mid_step = self._is_sharded
        sums = self._runner.accumulate(parts, batch_loss, reduce_every)
        self._failed_mid_step = False
        with phase("optimizer"):
            norms = self._gradient_norms([group.name for group in batch_loss.lora_groups])
        replay = replay_metrics(self._runner.loads, self.ranks, self.device) if self.args.expert_layers else {}
        counts = {"tokens": packed.n_tokens, "tokens_computed": sum(mb.n_computed_tokens for mb in parts)}
        scalars = {name: torch.tensor(count) for name, count in counts.items()}
        metrics = self._runner.read(sums, norms | replay, **scalars)
        if replay and math.isnan(metrics["router_replay/share"]):
            metrics = {name: value for name, value in metrics.items() if name not in replay}
        for group in batch_loss.lora_groups:
            metrics |= {f"{group.name}/tokens": group.tokens, f"{group.name}/loss_weight": group.weight}
        return metrics | {"micro_batches": float(len(parts)), "loss_weight": batch_loss.denominator}

    def _batch_loss(
        self, parts: list[MicroBatch], loss_fn: LossFn, loss_weight_fn: LossWeightFn, temperature: float
    ) -> BatchLoss:
        weight = total_weight(parts, loss_weight_fn, self.ranks, self.device)
        if not self.loras:
            return BatchLoss(loss_fn, loss_weight_fn, temperature, weight, {None: LossGroup(weight)})

        def require_loras() -> None:
            if any(NO_LORA in (mb.documents.lora_ids or ()) for mb in parts):
                raise BatchError(
                    f"a document has adapter {NO_LORA}, the base alone, whose weights are frozen, so that it has no "
                    "loss; leave it out of the batch"
                )

        self.ranks.require_on_all(require_loras, self.device)
        groups = lora_groups(parts, self._lora_names, loss_weight_fn, self.ranks, self.device)
        return BatchLoss(loss_fn, loss_weight_fn, temperature, weight, groups)

    def eval_batch(
        self, batch: Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn, temperature: float = 1.0
    ) -> dict[str, float]:
        """Return `loss`, `tokens`, `loss_weight` and the loss function's metrics, without gradient."""
        packed, parts = self._split(batch, temperature)
        batch_loss = self._batch_loss(parts, loss_fn, loss_weight_fn, temperature)
        self.model.eval()
        sums = self._runner.evaluate(parts, batch_loss)
        metrics = self._runner.read(sums, {}, tokens=torch.tensor(packed.n_tokens))
        for group in batch_loss.lora_groups:
            metrics[f"{group.name}/loss_weight"] = group.weight
        return metrics | {"loss_weight": batch_loss.denominator}

    def forward_batch(self, batch: Batch, temperature: float = 1.0, *, only_trained: bool = False) -> Tensor:
        """Return log p of each token at `temperature`, or a critic's value before it: [B, S]; [T] of a `PackedBatch`.

        `only_trained` scores only the tokens that `loss_mask` marks, 0 elsewhere, for less work in the head.
        """
        return self._score(batch, temperature, entropy=False, only_trained=only_trained)[0]

    def forward_with_entropy(
        self, batch: Batch, temperature: float = 1.0, *, only_trained: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return what `forward_batch` does, and the entropy (nats) of the distribution of each token."""
        if self.config.is_critic:
            raise ConfigError("a critic has no entropy; call forward_batch")
        logprobs, entropy = self._score(batch, temperature, entropy=True, only_trained=only_trained)
        return logprobs, entropy

    @contextmanager
    def without_lora(self) -> Iterator[None]:
        """Make the engine score with the frozen weights alone, until the end of the block."""
        with disable_lora(self.model):
            yield

    def step_lr_scheduler(self) -> None:
        """Set the learning rate of the next optimizer step: of several adapters that of each that has taken one."""
        if not self.loras:
            self._require_optimizer()[1].step()
            return
        for name in self._stepped:
            schedule = self.loras[name].schedule
            assert schedule is not None
            schedule.step()
        self._stepped = ()

    def weights(
        self, bucket_bytes: int = BUCKET_BYTES, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (native name, whole tensor) of every parameter, tied ones once, in the masters' dtype, and of every
        balancing bias; sharded ones are gathered in buckets of `bucket_bytes`, at least one tensor each.

        An adapter is added to the copies of its matrices that are yielded; several are not. With `dtype`, in which
        they are to be stored, the parameters are as wide before it is added, so that the sums are not rounded twice.
        """
        weights = self.base_weights(bucket_bytes)
        if not self.lora:
            yield from weights
            return
        if dtype is not None:
            biases, wide = self.adapter.buffer_shapes, dtype
            weights = ((name, x if name in biases else x.to(torch.promote_types(x.dtype, wide))) for name, x in weights)
        yield from merge_lora_weights(weights, dict(self.lora_weights()), self.lora)

    def lora_weights(self, lora_name: str | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (native name, whole tensor) of every adapter's a and b; none for a model without adapters.

        Of several adapters one that is `lora_name` is yielded with the names that it has where it is the only one.
        """
        if lora_name is None:
            yield from self._weight_gatherer.lora_weights(is_lora)
            return
        names = self._lora_trainer(lora_name).names
        for name, tensor in self._weight_gatherer.lora_weights(names.__contains__):
            yield names[name], tensor

    def load_lora(self, lora_name: str, path: str | os.PathLike[str]) -> None:
        """Load one of several adapters from a folder in PEFT's format; its optimizer and schedule stay.

        Every rank calls it. Raises CheckpointError for an adapter of other sizes.
        """
        own = self._lora_trainer(lora_name)
        if read_sizes(path, self.adapter) != own.sizes:
            raise CheckpointError(
                f"{os.fspath(path)} has other matrices, ranks or alphas than adapter {lora_name!r} of this run; "
                f"expected those of lora.loras.{lora_name}"
            )
        load_lora(path, self.model, self.adapter, own.sizes, lora_name)

    def _lora_trainer(self, lora_name: str) -> LoRATrainer:
        if lora_name not in self.loras:
            raise ConfigError(
                f"there is no adapter {lora_name!r}; this model has {', '.join(self.loras) or 'none with a name'}"
            )
        return self.loras[lora_name]

    @property
    def _weight_gatherer(self) -> WeightGatherer:
        return WeightGatherer(self.model, self._builder, self.adapter.native_shapes, self.ranks.pp)

    def base_weights(self, bucket_bytes: int = BUCKET_BYTES) -> Iterator[tuple[str, Tensor]]:
        """Same as `weights`, without adapters: of a model that has them, its frozen weights, not copied where this rank
        holds them whole."""
        return self._weight_gatherer.base(bucket_bytes)

    def hf_weights(self, dtype: torch.dtype | None = None, bucket_bytes: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, tensor) for exports in `dtype`, see `weights`; by default gathered one by one.

        Raises CheckpointError on every rank where a balancing bias that the family's checkpoints lack is not 0."""
        require_zero_expert_biases(self.model, self.adapter, self.ranks.pp)
        stored = self.adapter.stored_shapes
        weights = self.weights(bucket_bytes, dtype=dtype)
        yield from self.adapter.export((name, x) for name, x in weights if name in stored)

    @property
    def _base(self) -> str:
        """The checkpoint of the frozen weights of a model with adapters."""
        return os.fspath(self._loaded_from or self.config.path)

    @property
    def _base_digest(self) -> str:
        """The base's `checkpoint_digest`, read once: a save must not wait for the heads of its tensors."""
        if self._digest is None or self._digest[0] != self._base:
            self._digest = self._base, checkpoint_digest(self._base)
        return self._digest[1]

    @property
    def export_format(self) -> SaveFormat:
        """What a run leaves at its end: `peft` for a model with adapters, else `hf`."""
        return "hf" if self.config.lora is None else "peft"

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What must be equal where a native checkpoint is loaded: `model_fingerprint`; with adapters also their sizes
        and a hash of the base's files."""
        model = model_fingerprint(self.args)
        described: dict[str | None, Any] = {
            name: {matrix: asdict(size) for matrix, size in sizes.items()}
            for name, sizes in self._builder.loras.items()
        }
        if not described:
            return model
        sizes = described.get(None, described)  # the only one has no name
        return {**model, "adapters": sizes, "base": self._base_digest}

    def save(
        self,
        path: str | os.PathLike[str],
        format: SaveFormat = "hf",
        asynchronous: bool = False,
        dtype: torch.dtype | None = None,
        lora: str | None = None,
    ) -> None:
        """Write the weights, or the whole state; every rank calls it.

        Args:
            format: `hf` exports a Hugging Face checkpoint from any layout: shards, index, config and tokenizer, written
                by rank 0 alone, one shard in memory at a time, with adapters merged. `peft` exports the adapters alone
                in PEFT's format, of several each in a folder of its name. `native` saves this engine's state below
                `path` (see `archon.checkpoint.native`): each rank writes its part, and any layout can load it.
            asynchronous: for `native`: copy to the CPU, and write in the background. Errors are raised by the next save
                or by `wait_for_saves`.
            dtype: of an `hf` export, by default the masters'.
            lora: which of several adapters a `peft` export holds, in `path` itself.
        """
        if lora is not None and format != "peft":
            raise ConfigError(f"lora={lora!r} names what format='peft' exports, and format is {format!r}")
        if format == "native":
            if dtype is not None:
                raise ConfigError(f"format='native' keeps every dtype; dtype={dtype} belongs to format='hf'")
            state = {"engine": self.state_dict()}
            self.saver.save(path, self.step, state, None, self.fingerprint, asynchronous=asynchronous)
            return
        if format not in ("hf", "peft"):
            raise ConfigError(f"format must be 'hf', 'peft' or 'native', got {format!r} (what was 'dcp' is 'native')")
        if asynchronous:
            raise ConfigError("asynchronous=True needs format='native'; an 'hf' export is written before save returns")
        if format == "peft":
            self._save_loras(path, lora)
            return
        if self.loras:
            raise ConfigError(
                f"format='hf' merges an adapter into the weights, and this model has {len(self.loras)}; export them "
                "with format='peft', and merge one by archon export"
            )
        passthrough = False if self._loaded_from is None else self._loaded_from
        text_only = self.config.vision == "off"
        save_hf_distributed(
            path,
            self.hf_weights(dtype),
            like=self.config.path,
            dtype=dtype,
            passthrough=passthrough,
            text_only=text_only,
        )

    def _save_loras(self, path: str | os.PathLike[str], lora_name: str | None) -> None:
        if self.config.is_critic:
            raise ConfigError("format='peft' holds adapters and no value head; set format to 'native' or 'hf'")
        shapes = lora_specs(self.config)
        if not shapes:
            raise ConfigError("format='peft' writes adapters, and this model has none; set lora, or format to 'hf'")
        for name in shapes if lora_name is None else [self._lora_trainer(lora_name).name]:
            folder = path if name is None or lora_name is not None else os.path.join(path, name)
            sizes, experts = self._builder.loras[name], shapes[name].export_experts
            weights = dict(self.lora_weights(name))
            save_lora(folder, self.adapter, sizes, weights, base=self._base, experts=experts)

    def wait_for_saves(self) -> None:
        """Wait until the newest asynchronous save is on disk; raises its error."""
        self.saver.wait()

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load the weights of a checkpoint of the same model; optimizer and schedule stay. Every rank calls it.

        It may be a Hugging Face checkpoint, which sets balancing biases that it lacks to 0, or a native one of any
        layout and dtype.
        """
        folder = find_checkpoint(path)
        if folder is None:
            load_hf_weights(self.model, self.adapter, path)
            self._loaded_from = path
            for name, bias in expert_biases(self.model).items():
                if name not in self.adapter.buffer_shapes:
                    bias.zero_()
            return
        with open_state(folder, self.fingerprint) as (_, state):
            load_model_state(self.model, state["engine"]["model"], self._known_names(), any_dtype=True)

    def state_dict(self) -> dict[str, Any]:
        """Return everything a bitwise resume needs: weights, moments, schedule, random generators, step, version.

        Each rank has its own part of sharded tensors. They are not copies, as in PyTorch: store or copy them before the
        next step.
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
            state["adapters"] = {name: own.state_dict(self.model) for name, own in self.loras.items()}
            state["stepped"] = list(self._stepped)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict` into an initialized engine of the same config. Raises CheckpointError for a mismatch.

        A state from a checkpoint may be of any layout. Each rank's random generators continue in the same layout; in
        another one all of them start from rank 0's.
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
        for name, own in self.loras.items():
            own.load_state_dict(self.model, state["adapters"][name], self._known_names())
        self._stepped = tuple(state.get("stepped", ()))
        self.step, self.version = int(state["step"]), int(state["version"])
        rng = state["rng"]
        if isinstance(rng, PerRank):
            same = state.get("layout") == str(self.layout) and len(rng.values) > 1
            rng = rng.values[torch.distributed.get_rank() if same else 0]
        set_rng_state(read_all(rng))

    def _known_names(self) -> list[str]:
        """Return the names in a state of the whole model; none where this rank holds all layers."""
        if isinstance(self.model, BaseArchonModel):
            return []
        return list(model_state(self._builder.full_model()))

    def offload(self) -> None:
        """Free the device: drop gradients, move parameters and optimizer state to the CPU.

        Until `onload` the engine refuses to run or save its state.
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
        self.model.tie_weights()
        for optimizer in (self.optimizer, *(own.optimizer for own in self.loras.values())):
            for parameter, moments in optimizer.state.items() if optimizer is not None else ():
                moments.update({key: x.to(local_tensor(parameter).device) for key, x in moments.items()})
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _clear_gradients(self) -> None:
        if not self.loras:
            self.model.zero_grad(set_to_none=True)
            return
        # Nothing else is trained, and finding the many parameters takes longer than freeing their gradients.
        for own in self.loras.values():
            for parameter in own.parameters:
                parameter.grad = None

    def _gradient_norms(self, loras: Sequence[str]) -> dict[str, Tensor]:
        """Return `grad_norm`, that of the whole model's gradient, and `NAME/grad_norm` of several `loras`: scalars
        on the device, the same on every rank."""
        if loras:  # nothing else is trained
            norms = gradient_norms([self.loras[name].parameters for name in loras], self.ranks.pp)
            of_each = {f"{name}/grad_norm": norm for name, norm in zip(loras, norms.unbind(), strict=True)}
            return {"grad_norm": norms.square().sum().sqrt(), **of_each}
        parameters = dict(self.model.named_parameters())
        if self.adapter.is_tied and self.parallel_dims.pp_enabled:
            parameters.pop("output.weight", None)  # the first stage counts the matrix that the last one shares
        return {"grad_norm": gradient_norm(parameters.values(), self.ranks.pp)}

    @property
    def skipped_steps(self) -> int:
        """The number of steps so far that changed no weight, because their gradient was not finite."""
        return self._skips.total + sum(own.skipped_steps for own in self.loras.values())

    @property
    def full_model(self) -> BaseArchonModel:
        """The model, if this rank holds all of its layers. Raises ConfigError in a pipeline."""
        if not isinstance(self.model, BaseArchonModel):
            raise ConfigError(f"layout {self.config.layout}: a pipeline's rank holds only a part of the model's layers")
        return self.model

    def _split(self, batch: Batch, temperature: float = 1.0) -> tuple[PackedBatch, list[MicroBatch]]:
        if self.device.type == "cpu":
            adjust_threads()

        def prepare() -> tuple[PackedBatch, list[MicroBatch]]:
            self._check_usable()
            packed, parts = micro_batches(
                batch,
                self.config.max_tokens_per_mb,
                self.args.vocab_size,
                share_prefixes=self._share_prefixes,
                every_token=bool(self.args.expert_layers) or self.config.is_critic,
                sort=self._sort_documents,
                n_loras=len(self.loras) or None,
                image_format=self.args.image_format,
            )
            if packed.routed_experts is not None:
                check_replay(packed.routed_experts, self.args)
            packed.check_temperatures(temperature)
            return packed, parts

        # If only one rank refused its batch, the others would wait in a collective, or mix two batches if its caller
        # continued with the next.
        return self.ranks.require_on_all(prepare, self.device)

    def _score(self, batch: Batch, temperature: float, *, entropy: bool, only_trained: bool) -> list[Tensor]:
        packed, parts = self._split(batch, temperature)
        self.model.eval()
        results = self._runner.scores(parts, temperature, entropy, only_trained)
        columns = [merge(packed, [mb.documents for mb in parts], column).cpu() for column in zip(*results, strict=True)]
        if isinstance(batch, PackedBatch):
            return columns
        return [unpack(packed, column, batch["input_ids"].shape) for column in columns]

    def _require_optimizer(self) -> tuple[Optimizer, LRSchedule, OptimizerConfig]:
        if self.optimizer is None or self.scheduler is None or self.config.optimizer is None:
            raise ConfigError("this engine was configured without an optimizer (optimizer: null), so it cannot train")
        return self.optimizer, self.scheduler, self.config.optimizer

    def _check_usable(self) -> None:
        if self._offloaded:
            raise ConfigError("the engine is offloaded; call onload() first")
        if self._failed_mid_step:
            raise ConfigError(
                "an error interrupted an earlier train_batch, and its gradients cannot be undone; "
                "call initialize() and load the last checkpoint"
            )
