"""ArchonEngine: one model, its optimizer and its training step, without rewards or rollouts."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from archon.engine import heap
from archon.engine.batch import PackedBatch, merge, unpack
from archon.engine.engine_io import EngineIO
from archon.engine.initialize import build_engine
from archon.engine.loss import LossFn, LossWeightFn
from archon.engine.micro_batch import Batch, MicroBatch, micro_batches
from archon.engine.optim import LRSchedule, clip_gradients, gradient_norm, gradient_norms
from archon.engine.router_balance import replay_metrics
from archon.engine.step_in_backward import StepInBackward
from archon.engine.threads import adjust_threads
from archon.engine.train_step import BatchLoss, LossGroup, MicroBatchRunner, lora_groups, mtp_weights, total_weight
from archon.engine.watchdog import StallWatchdog
from archon.models.layers.routed_experts import check_replay
from archon.models.lora.dropout import hash_text
from archon.models.lora.mapping import NO_LORA
from archon.models.lora.model import disable_lora, share_frozen
from archon.models.lora.saved_modules import original_weights
from archon.models.mtp import MTP_PREFIX
from archon.parallel.gather import full_tensors
from archon.parallel.phase import phase
from archon.schema.config import EngineConfig, OptimizerConfig
from archon.schema.errors import BatchError, ConfigError, UserError


class ArchonEngine(EngineIO):
    """Engine that trains or evaluates one model of a registered family.

    Batches are padded dictionaries (see `archon.engine.batch.pack`) or `PackedBatch`es. Per-token results of a padded
    batch are token-aligned [B, S] on the CPU: index t is about token t, with 0 at first tokens and padding.

        engine = ArchonEngine(EngineConfig(path="Qwen3-0.6B"))
        engine.initialize(total_steps=100)
        for batch in batches:
            metrics = engine.train_batch(batch, CrossEntropyLoss(), loss_token_count)
            engine.step_lr_scheduler()
        engine.save("out")

    Attributes:
        stall_watch: writes every rank's stacks to its `folder` when a step takes longer than `config.stall_s`.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.stall_watch = StallWatchdog(None)

    def initialize(self, total_steps: int | None = None) -> None:
        """Build, parallelize and load the model; then make its optimizer and schedule.

        Args:
            total_steps: the end of a linear or cosine schedule.
        """
        self._built = build_engine(self.config, total_steps)
        self._stepped = ()
        self._failed_mid_step = False
        self.stall_watch = StallWatchdog(self.config.stall_s)
        weakref.finalize(self, self.stall_watch.end)

    def share_base(self, owner: ArchonEngine) -> None:
        """Use the frozen weights of another engine with the same layout in place of equal weights of this one.

        Call it before the first batch. There is no effect unless both engines have a LoRA over the same checkpoint.
        """
        if self.lora and owner.lora and self._base == owner._base:
            share_frozen(self.model, owner.model)

    def train_batch(
        self, batch: Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn, temperature: float = 1.0
    ) -> dict[str, float]:
        """Take one optimizer step on Σ loss_fn / Σ loss_weight_fn, both over all micro-batches.

        In a multi-LoRA model each LoRA with documents takes a separate step, see `archon.engine.lora`.

        Returns:
            `loss`, `grad_norm` (before clipping), `lr`, `tokens`, `tokens_computed` (fewer if documents share a
            prefix), `micro_batches`, `loss_weight` (the denominator), `skipped` (1 if the gradient was not finite; then
            no weight or moment changed), and the metrics of the loss function. Trained MTP layers add `mtp_loss` (the
            mean over their labels) and `mtp_grad_norm`; `grad_norm` leaves out their gradients. In a multi-LoRA model
            `loss` is the sum over LoRAs, `lr` the largest rate, `skipped` the number of skipped LoRAs, and NAME/loss
            and so on are the metrics of each LoRA.
        """
        if self.loras and self.config.optimizer is not None:
            return self._train_loras(batch, loss_fn, loss_weight_fn, temperature)
        optimizer, scheduler, config = self._require_optimizer()
        with self.stall_watch.block():
            metrics = self._accumulate(batch, loss_fn, loss_weight_fn, temperature, self.built.stepper)
            finite = abs(metrics["grad_norm"]) < float("inf")
            finite = finite and abs(metrics.get("mtp_grad_norm", 0.0)) < float("inf")
            if self.built.stepper is not None and not finite:
                self._failed_mid_step = True
                raise UserError(
                    f"the gradient norm of step {self.step + 1} is not finite, and gradient_reduction = "
                    "step_in_backward has changed the weights; resume from the last checkpoint, with a lower "
                    "optimizer.lr or with gradient_reduction = per_step, which skips such steps"
                )
            if finite:
                with phase("optimizer"):
                    trunk, mtp = self._trunk_and_mtp()
                    clip_gradients(trunk.values(), metrics["grad_norm"], config.max_grad_norm)
                    clip_gradients(mtp.values(), metrics.get("mtp_grad_norm", 0.0), config.max_grad_norm)
                    optimizer.step()
                if self.config.router_bias_update_rate:
                    for load in self.built.runner.loads:
                        load.update_biases(self.config.router_bias_update_rate, self.ranks)
            optimizer.zero_grad(set_to_none=True)
            self.step += 1
            self._skips.count(not finite, self.step, config.max_skipped_in_a_row)
            heap.trim_heap_if_grown("training")
            return metrics | {"lr": scheduler.lr, "skipped": float(not finite)}

    def _train_loras(
        self, batch: Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn, temperature: float
    ) -> dict[str, float]:
        """Train every LoRA with documents in the batch."""
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
            lrs, skipped = ([metrics[f"{name}/{key}"] for name in trained] for key in ("lr", "skipped"))
            return metrics | {"lr": max(lrs), "skipped": sum(skipped)}

    def gradients(
        self,
        batch: Batch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        temperature: float = 1.0,
        *,
        full: bool = True,
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Compute the gradients of `train_batch` before clipping; no weight changes. Every rank calls it.

        Returns:
            The gradients by name of the parameters in this rank's pipeline stages, tied ones once, in the master dtype.
            They are whole tensors, gathered from all ranks; with `full=False` they are this rank's, as DTensors if they
            are sharded. Also `loss`, `grad_norm`, `tokens`, `micro_batches`, `loss_weight` and the metrics of the loss
            function.
        """
        metrics = self._accumulate(batch, loss_fn, loss_weight_fn, temperature)
        grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return dict(full_tensors(grads.items())) if full else grads, metrics

    def _accumulate(
        self,
        batch: Batch,
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        temperature: float,
        stepper: StepInBackward | None = None,
    ) -> dict[str, float]:
        """Accumulate the batch's gradients in the parameters; return the metrics before the optimizer step.

        A `stepper` updates parameters with complete gradients during the last backward pass, and frees the gradients.
        """
        # 1. Split the batch, and count its loss weight on all ranks.
        built, runner = self.built, self.built.runner
        packed, parts = self._split(batch, temperature)
        batch_loss = self._batch_loss(parts, loss_fn, loss_weight_fn, temperature)
        if self.lora and self.config.optimizer is not None and any(size.dropout for size in self.lora.values()):
            assert self.config.lora is not None
            dropout_seed = hash_text(f"{self.config.lora.seed} {self.step}")
            parts = [replace(mb, dropout_seed=dropout_seed) for mb in parts]
        # 2. Run all micro-batches forward and backward.
        if not self.model.training:
            self.model.train()
        self._clear_gradients()
        for load in runner.loads:
            load.clear()
        self._failed_mid_step = built.swaps_weights or stepper is not None
        reduce_every = self.config.gradient_reduction == "per_microbatch"
        if stepper is None:
            sums = runner.accumulate(parts, batch_loss, reduce_every)
        else:
            assert isinstance(runner, MicroBatchRunner)  # a pipeline has several processes
            sums = runner.accumulate(parts, batch_loss, reduce_every, stepper.start)
            stepper.stop()
        self._failed_mid_step = False
        # 3. Read the gradient norm and all metrics in one transfer.
        with phase("optimizer"):
            norms = self._gradient_norms([group.name for group in batch_loss.lora_groups if group.name is not None])
            if stepper is not None:
                norms = {"grad_norm": torch.stack([*stepper.norms, *norms.values()]).square().sum().sqrt()}
        replay = replay_metrics(runner.loads, self.ranks, self.device) if self.args.expert_layers else {}
        counts = {"tokens": packed.n_tokens, "tokens_computed": sum(mb.n_computed_tokens for mb in parts)}
        scalars = {name: torch.tensor(count) for name, count in counts.items()}
        metrics = runner.read(sums, norms | replay, **scalars)
        if replay and math.isnan(metrics["router_replay/share"]):
            metrics = {name: value for name, value in metrics.items() if name not in replay}
        for group in batch_loss.lora_groups:
            metrics |= {f"{group.name}/tokens": group.tokens, f"{group.name}/loss_weight": group.weight}
        return metrics | {"micro_batches": float(len(parts)), "loss_weight": batch_loss.denominator}

    def _batch_loss(
        self, parts: list[MicroBatch], loss_fn: LossFn, loss_weight_fn: LossWeightFn, temperature: float
    ) -> BatchLoss:
        """Return the loss of a batch, with the denominators of all ranks."""
        weight = total_weight(parts, loss_weight_fn, self.ranks, self.device)
        if not self.loras:
            factors = mtp_weights(parts, self.args.n_mtp_layers, self.config.mtp_loss_weight, self.ranks, self.device)
            return BatchLoss(loss_fn, loss_weight_fn, temperature, weight, {None: LossGroup(weight)}, factors)

        def require_loras() -> None:
            if any(NO_LORA in (mb.documents.lora_ids or ()) for mb in parts):
                raise BatchError(
                    f"a document has LoRA index {NO_LORA}, the base model, and its weights are frozen; leave the "
                    "document out of the batch"
                )

        self.ranks.require_on_all(require_loras, self.device)
        groups = lora_groups(parts, tuple(self.loras), loss_weight_fn, self.ranks, self.device)
        return BatchLoss(loss_fn, loss_weight_fn, temperature, weight, groups)

    def _clear_gradients(self) -> None:
        if not self.loras:
            self.model.zero_grad(set_to_none=True)
            return
        # Only LoRAs are trained, and finding all parameters takes longer than freeing these gradients.
        for lora in self.loras.values():
            for parameter in lora.parameters:
                parameter.grad = None

    def _gradient_norms(self, loras: Sequence[str]) -> dict[str, Tensor]:
        """Return `grad_norm` and the `NAME/grad_norm` of `loras` as scalars on the device."""
        if loras:  # only LoRAs are trained
            norms = gradient_norms([self.loras[name].parameters for name in loras], self.ranks.pp)
            lora_norms = {f"{name}/grad_norm": norm for name, norm in zip(loras, norms.unbind(), strict=True)}
            return {"grad_norm": norms.square().sum().sqrt(), **lora_norms}
        parameters, mtp = self._trunk_and_mtp()
        if self.adapter.is_tied and self.parallel_dims.pp_enabled:
            parameters.pop("output.weight", None)  # the first stage counts the matrix that the last one shares
        total_norms = {"grad_norm": gradient_norm(parameters.values(), self.ranks.pp)}
        if mtp:
            total_norms["mtp_grad_norm"] = gradient_norm(mtp.values(), self.ranks.pp)
        return total_norms

    def _trunk_and_mtp(self) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        """Return the parameters by name: without the MTP layers, and of the MTP layers.

        Their gradients are clipped separately, so that training the MTP layers does not change the trunk.
        """
        named = dict(self.model.named_parameters())
        mtp = {name: named.pop(name) for name in [*named] if name.startswith(MTP_PREFIX)}
        return named, mtp

    def eval_batch(
        self, batch: Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn, temperature: float = 1.0
    ) -> dict[str, float]:
        """Return `loss`, `tokens`, `loss_weight` and the metrics of the loss function, without gradient."""
        packed, parts = self._split(batch, temperature)
        batch_loss = self._batch_loss(parts, loss_fn, loss_weight_fn, temperature)
        self.model.eval()
        sums = self.built.runner.evaluate(parts, batch_loss)
        metrics = self.built.runner.read(sums, {}, tokens=torch.tensor(packed.n_tokens))
        for group in batch_loss.lora_groups:
            metrics[f"{group.name}/loss_weight"] = group.weight
        return metrics | {"loss_weight": batch_loss.denominator}

    def forward_batch(self, batch: Batch, temperature: float = 1.0, *, only_trained: bool = False) -> Tensor:
        """Return log p of each token at `temperature`, or a critic's value before each token.

        The result is [B, S], or [T] for a `PackedBatch`. `only_trained` scores only the tokens of `loss_mask`, with 0
        elsewhere, for less work in the head.
        """
        return self._score(batch, temperature, entropy=False, only_trained=only_trained)[0]

    def forward_with_entropy(
        self, batch: Batch, temperature: float = 1.0, *, only_trained: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of `forward_batch` and the entropy (nats) of each token's distribution."""
        if self.config.is_critic:
            raise ConfigError("a critic has no entropy; call forward_batch")
        logprobs, entropy = self._score(batch, temperature, entropy=True, only_trained=only_trained)
        return logprobs, entropy

    def _score(self, batch: Batch, temperature: float, *, entropy: bool, only_trained: bool) -> list[Tensor]:
        packed, parts = self._split(batch, temperature)
        self.model.eval()
        results = self.built.runner.scores(parts, temperature, entropy, only_trained)
        documents = [mb.documents for mb in parts]
        columns = [merge(packed, documents, column).cpu() for column in zip(*results, strict=True)]
        if isinstance(batch, PackedBatch):
            return columns
        return [unpack(packed, column, batch["input_ids"].shape) for column in columns]

    def _split(self, batch: Batch, temperature: float = 1.0) -> tuple[PackedBatch, list[MicroBatch]]:
        """Check a batch on all ranks, and split it into micro-batches."""
        built = self.built
        if self.device.type == "cpu":
            adjust_threads()

        def prepare() -> tuple[PackedBatch, list[MicroBatch]]:
            self._check_usable()
            packed, parts = micro_batches(
                batch,
                self.config.max_tokens_per_mb,
                self.args.vocab_size,
                share_prefixes=built.share_prefixes,
                every_token=bool(self.args.expert_layers) or self.config.is_critic,
                sort=built.sort_documents,
                n_loras=len(self.loras) or None,
                image_format=self.args.image_format,
            )
            if packed.routed_experts is not None:
                check_replay(packed.routed_experts, self.args)
            packed.check_temperatures(temperature)
            return packed, parts

        # If only one rank refused its batch, the others would wait in a collective, or mix two batches if its caller
        # continued with the next one.
        return self.ranks.require_on_all(prepare, self.device)

    @contextmanager
    def without_lora(self) -> Iterator[None]:
        """Disable the LoRA until the end of the block, so that the engine scores with the base weights."""
        with disable_lora(self.model), original_weights(self.model, self.built.originals):
            yield

    def step_lr_scheduler(self) -> None:
        """Advance the learning rate; in a multi-LoRA model only of the LoRAs that took a step."""
        if not self.loras:
            self._require_optimizer()[1].step()
            return
        for name in self._stepped:
            schedule = self.loras[name].schedule
            assert schedule is not None
            schedule.step()
        self._stepped = ()

    def _require_optimizer(self) -> tuple[Optimizer, LRSchedule, OptimizerConfig]:
        if self.optimizer is None or self.scheduler is None or self.config.optimizer is None:
            raise ConfigError("this engine was configured without an optimizer (optimizer: null), so it cannot train")
        return self.optimizer, self.scheduler, self.config.optimizer
