"""Run the micro-batches of a batch through pipeline stages, with the interface of `train_step.MicroBatchRunner`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from archon.engine.batch import PackedBatch
from archon.engine.router_balance import RouterLoad
from archon.engine.train_step import BatchLoss, ContextSharding, MetricSums, MicroBatchRunner
from archon.parallel.comm import Group
from archon.parallel.control_plane import ControlPlane
from archon.parallel.fsdp import local_tensor, reshard
from archon.parallel.phase import phase
from archon.parallel.pipeline import SPLIT_BACKWARD, StagedModel
from archon.parallel.pipeline_schedule import Pipeline
from archon.parallel.ranks import SOLO, Ranks
from archon.parallel.torch_groups import default_group, shared_group


class PipelineRunner:
    """Run micro-batches through a pipeline; its last stage applies the loss.

    All micro-batches of a batch are padded to the longest, since stages send tensors of one shape. A schedule that
    needs more micro-batches than there are is given idle ones, which are not scored.
    """

    def __init__(
        self,
        model: StagedModel,
        device: torch.device,
        tokens: ContextSharding,
        is_critic: bool,
        pipeline: Pipeline,
        lora_names: tuple[str, ...] = (),
    ) -> None:
        self.model, self.device, self.tokens, self.pipeline = model, device, tokens, pipeline
        self.ranks = tokens.ranks
        self.stages = {
            number: MicroBatchRunner(stage, device, tokens, is_critic, RouterLoad(stage), lora_names=lora_names)  # type: ignore[arg-type]
            for number, stage in zip(model.numbers, model.stages, strict=True)
        }
        self.loads = [stage.load for stage in self.stages.values()]
        self.last_stage = model.plan.n_stages - 1
        self.last_rank = model.plan.stage_rank(self.last_stage)
        self.is_last = self.last_stage in self.stages
        self._plane = ControlPlane.from_group(self.ranks.pp, device)
        self._tied_ranks = _tied_group(model, self.ranks, device)

    def accumulate(self, parts: Sequence[PackedBatch], loss: BatchLoss, reduce_every: bool) -> MetricSums:
        """Same as `MicroBatchRunner.accumulate`; the sums are empty except on the last stage's ranks."""
        sums, fuse = MetricSums.empty(loss, self.device), self.model.plan.schedule not in SPLIT_BACKWARD
        self._run(self.pipeline.backward, parts, lambda runner, mb: runner.loss(mb, loss, sums, fuse=fuse))
        self._reduce_tied()
        return sums

    def evaluate(self, parts: Sequence[PackedBatch], loss: BatchLoss) -> MetricSums:
        """Same as `MicroBatchRunner.evaluate`; the sums are empty except on the last stage's ranks."""
        sums = MetricSums.empty(loss, self.device)
        self._run(self.pipeline.forward, parts, lambda runner, mb: runner.loss(mb, loss, sums))
        return sums

    def scores(
        self, parts: Sequence[PackedBatch], temperature: float, entropy: bool, only_trained: bool
    ) -> list[list[Tensor]]:
        """Same as `MicroBatchRunner.scores`, on every rank."""
        results: list[list[Tensor]] = []

        def finish(runner: MicroBatchRunner, mb: PackedBatch) -> Tensor:
            results.append(runner.score(mb, temperature, entropy, only_trained))
            return mb.tokens

        self._run(self.pipeline.forward, parts, finish)
        first = results[0][0] if results else None
        dtype, columns = self._plane.broadcast_json(
            lambda: None if first is None else [str(first.dtype).removeprefix("torch."), len(results[0])],
            self.last_rank,
        )
        for index, mb in enumerate(parts):
            if not self.is_last:
                results.append(
                    [torch.empty(mb.n_tokens, dtype=getattr(torch, dtype), device=self.device) for _ in range(columns)]
                )
            for column in results[index]:
                dist.broadcast(column, group=self.ranks.pp.process_group, group_src=self.last_rank)
        return results

    def read(self, sums: MetricSums, replicated: Mapping[str, Tensor], **scalars: Tensor) -> dict[str, float]:
        """Same as `MetricSums.read`; the last stage's ranks broadcast the result or their error."""
        values: Any = None
        error: RuntimeError | None = None
        if self.is_last:
            try:
                values = sums.read(self.ranks, {}, **scalars)
            except RuntimeError as raised:
                values, error = str(raised), raised
        values = self._plane.broadcast_json(lambda: values, self.last_rank)
        if isinstance(values, str):
            raise error or RuntimeError(values)
        return values | {name: float(value) for name, value in replicated.items()}

    def _run(
        self,
        through: Callable[..., None],
        parts: Sequence[PackedBatch],
        finish: Callable[[MicroBatchRunner, PackedBatch], Tensor],
    ) -> None:
        """Run all micro-batches through the pipeline; the last stage calls `finish` with each but the idle ones, which
        only take part in collectives."""
        count = self.ranks.all_reduce_max(len(parts), self.device)
        trains = through == self.pipeline.backward
        count = self.model.plan.micro_batches(count) if trains else count
        min_tokens = max(self.tokens.rows(mb) for mb in parts)
        first = next(iter(self.stages.values()))
        batches = [mb.to(self.device) for mb in first.with_vision_flags(parts, count)]

        def run(stage: int, index: int, hidden: Tensor | None) -> Tensor:
            idle, mb = index >= len(parts), batches[index]
            runner = replace(self.stages[stage], input=hidden, min_tokens=min_tokens)
            with phase("forward"):
                if stage < self.last_stage:
                    out = runner.hidden(mb)
                else:
                    out = runner.run_idle(mb) if idle else finish(runner, mb)
            if not idle:
                runner.load.add()
            return out

        try:
            through(run, count, min_tokens // self.ranks.tp.size)
        finally:
            if not trains:
                reshard(self.model)

    def _reduce_tied(self) -> None:
        """Sum the gradients of a tied matrix, of which the first and the last stage each have a term."""
        if self._tied_ranks is None:
            return
        named = dict(self.model.named_parameters())
        own = [named[name] for name in ("tok_embeddings.weight", "output.weight") if name in named]
        grads = [local_tensor(p.grad) for p in own if p.grad is not None]
        if not grads:  # of another stage, or frozen
            return
        total = torch.stack(grads).sum(0)
        if self._tied_ranks.size > 1:
            dist.all_reduce(total, group=self._tied_ranks.process_group)
        for grad in grads:
            grad.copy_(total)


def _tied_group(model: StagedModel, ranks: Ranks, device: torch.device) -> Group | None:
    """Return the ranks of a pipeline that hold the embedding and the head of a tied model; None for an untied one."""
    args: Any = model.stages[0].args
    if not args.tie_word_embeddings or args.is_critic:
        return None
    ends = sorted({model.plan.stage_rank(0), model.plan.stage_rank(model.plan.n_stages - 1)})
    if len(ends) == 1:
        return SOLO
    if len(ends) == ranks.pp.size:
        return ranks.pp
    members = dist.get_process_group_ranks(ranks.pp.process_group)
    mine = torch.tensor([members[end] for end in ends], device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    pairs = tuple(sorted({tuple(pair.tolist()) for pair in everyone}))
    own = shared_group(default_group(), "tied_ends", pairs)
    return SOLO if own is None else Group.from_process_group(own)
