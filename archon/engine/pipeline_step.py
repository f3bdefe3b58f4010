"""Run the micro-batches of a batch through pipeline stages, like `train_step.MicroBatchRunner`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from archon.engine.metrics import MetricSums
from archon.engine.micro_batch import MicroBatch
from archon.engine.plan import ForwardPlan, ForwardPlanner, ScoredTokens
from archon.engine.router_balance import RouterLoad
from archon.engine.train_step import BatchLoss, MicroBatchRunner
from archon.parallel.comm import Group
from archon.parallel.control_plane import ControlPlane
from archon.parallel.fsdp import local_tensor, reshard
from archon.parallel.mesh import default_group, shared_group
from archon.parallel.phase import phase
from archon.parallel.pipeline import SPLIT_BACKWARD, StagedModel
from archon.parallel.pipeline_schedule import Pipeline
from archon.parallel.ranks import SOLO, Ranks


class PipelineRunner:
    """Step of micro-batches through a pipeline; its last stage applies the loss.

    All micro-batches of a batch are padded to the longest one, since stages send tensors of one shape. If a schedule
    needs more micro-batches than a batch has, idle ones without scores are added.
    """

    def __init__(self, model: StagedModel, planner: ForwardPlanner, pipeline: Pipeline) -> None:
        self.model, self.planner, self.pipeline, self.ranks = model, planner, pipeline, planner.ranks
        self.stages = {
            number: MicroBatchRunner(stage, planner, RouterLoad(stage))  # type: ignore[arg-type]
            for number, stage in zip(model.numbers, model.stages, strict=True)
        }
        self.loads = [stage.load for stage in self.stages.values()]
        self.last_stage = model.plan.n_stages - 1
        self.last_rank = model.plan.stage_rank(self.last_stage)
        self.is_last = self.last_stage in self.stages
        self._plane = ControlPlane.from_group(self.ranks.pp, planner.device)
        self._tied_ranks = _tied_group(model, self.ranks, planner.device)

    def accumulate(self, parts: Sequence[MicroBatch], loss: BatchLoss, reduce_every: bool) -> MetricSums:
        """Add the gradient of the batch's loss; the sums are empty except on the last stage's ranks."""
        sums, fuse = loss.sums(self.planner.device), self.model.plan.schedule not in SPLIT_BACKWARD
        self._run(
            self.pipeline.backward,
            parts,
            "trained",
            lambda runner, plan, hidden: runner.loss(plan, loss, sums, hidden=hidden, fuse=fuse),
        )
        self._reduce_tied()
        return sums

    def evaluate(self, parts: Sequence[MicroBatch], loss: BatchLoss) -> MetricSums:
        """Return the sums of the micro-batches; they are empty except on the last stage's ranks."""
        sums = loss.sums(self.planner.device)
        self._run(
            self.pipeline.forward,
            parts,
            "trained",
            lambda runner, plan, hidden: runner.loss(plan, loss, sums, hidden=hidden),
        )
        return sums

    def scores(
        self, parts: Sequence[MicroBatch], temperature: float, entropy: bool, only_trained: bool
    ) -> list[list[Tensor]]:
        """Return the scores of each micro-batch on every rank; see `MicroBatchRunner.scores`."""
        results: list[list[Tensor]] = []

        def finish(runner: MicroBatchRunner, plan: ForwardPlan, hidden: Tensor | None) -> Tensor:
            results.append(runner.score(plan, temperature, entropy, hidden=hidden))
            return plan.documents.tokens

        self._run(self.pipeline.forward, parts, "trained" if only_trained else "labeled", finish)
        first = results[0][0] if results else None
        dtype, columns = self._plane.broadcast_json(
            lambda: None if first is None else [str(first.dtype).removeprefix("torch."), len(results[0])],
            self.last_rank,
        )
        for index, mb in enumerate(parts):
            if not self.is_last:
                options: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": self.planner.device}
                results.append([torch.empty(mb.documents.n_tokens, **options) for _ in range(columns)])
            for column in results[index]:
                dist.broadcast(column, group=self.ranks.pp.process_group, group_src=self.last_rank)
        return results

    def read(self, sums: MetricSums, replicated: Mapping[str, Tensor], **scalars: Tensor) -> dict[str, float]:
        """Read the metrics; the last stage's ranks broadcast the result or their error."""
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
        schedule: Callable[..., None],
        parts: Sequence[MicroBatch],
        scored: ScoredTokens,
        finish: Callable[[MicroBatchRunner, ForwardPlan, Tensor | None], Tensor],
    ) -> None:
        """Run all micro-batches through the pipeline; the last stage calls `finish` with each of this rank's.

        Idle micro-batches only take part in collectives.
        """
        # 1. Plan all micro-batches with equal numbers of tokens.
        count = self.ranks.all_reduce_max(len(parts), self.planner.device)
        trains = schedule == self.pipeline.backward
        count = self.model.plan.micro_batches(count) if trains else count
        min_tokens = max(self.planner.rows(mb) for mb in parts)
        flags = self.planner.vision_flags(parts, count)
        scheduled = [(mb, scored) for mb in parts] + [(parts[0], "none")] * (count - len(parts))
        plans = [
            self.planner.plan(mb, tokens, runs, min_tokens=min_tokens)
            for (mb, tokens), runs in zip(scheduled, flags, strict=True)
        ]

        # 2. Run the schedule's forwards of each stage on this rank.
        def run(stage: int, index: int, hidden: Tensor | None) -> Tensor:
            runner, plan, is_idle = self.stages[stage], plans[index], index >= len(parts)
            with phase("forward"):
                if stage < self.last_stage:
                    out = runner.model(plan.model_inputs(hidden))
                else:
                    out = runner.run_idle(plan, hidden) if is_idle else finish(runner, plan, hidden)
            if not is_idle:
                runner.load.add()
            return out

        try:
            schedule(run, count, min_tokens // self.ranks.tp.size)
        finally:
            if not trains:
                reshard(self.model)

    def _reduce_tied(self) -> None:
        """Sum the gradients of a tied matrix over the first and the last stage."""
        if self._tied_ranks is None:
            return
        named = dict(self.model.named_parameters())
        tied = [named[name] for name in ("tok_embeddings.weight", "output.weight") if name in named]
        grads = [local_tensor(p.grad) for p in tied if p.grad is not None]
        if not grads:  # the matrix is on other stages, or frozen
            return
        total = torch.stack(grads).sum(0)
        if self._tied_ranks.size > 1:
            dist.all_reduce(total, group=self._tied_ranks.process_group)
        for grad in grads:
            grad.copy_(total)


def _tied_group(model: StagedModel, ranks: Ranks, device: torch.device) -> Group | None:
    """Return the pipeline ranks with the embedding and the head of a tied model; None if untied."""
    args: Any = model.stages[0].args
    if not args.tie_word_embeddings or args.is_critic:
        return None
    ends = sorted({model.plan.stage_rank(0), model.plan.stage_rank(model.plan.n_stages - 1)})
    if len(ends) == 1:
        return SOLO
    if len(ends) == ranks.pp.size:
        return ranks.pp
    members = dist.get_process_group_ranks(ranks.pp.process_group)
    local_pair = torch.tensor([members[end] for end in ends], device=device)
    gathered = [torch.empty_like(local_pair) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local_pair)
    pairs = tuple(sorted({tuple(pair.tolist()) for pair in gathered}))
    group = shared_group(default_group(), "tied_ends", pairs)
    return SOLO if group is None else Group.from_process_group(group)
