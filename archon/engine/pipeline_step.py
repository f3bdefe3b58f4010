"""One pass over a batch when the model is cut into pipeline stages: the interface of `train_step.Forward`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from archon.engine.batch import PackedBatch
from archon.engine.loss import LossFn, LossWeightFn
from archon.engine.router_balance import RouterLoad
from archon.engine.token_split import TokenSplit
from archon.engine.train_step import Forward, MetricSums, whole_afterwards
from archon.parallel.comm import Group
from archon.parallel.fsdp import local_tensor
from archon.parallel.phase import phase
from archon.parallel.pipeline import SPLIT_BACKWARD, Pipeline, StagedModel
from archon.parallel.ranks import SOLO, Ranks


class PipelineForward:
    """Runs micro-batches through a pipeline; its last stage applies the loss.

    All micro-batches of a batch are padded to the tokens of the longest, since stages pass tensors of one shape; a
    schedule that wants more micro-batches than there are is given idle ones, of which nothing is scored.
    """

    def __init__(
        self, model: StagedModel, device: torch.device, tokens: TokenSplit, is_critic: bool, pipeline: Pipeline
    ) -> None:
        self.model, self.device, self.tokens, self.pipeline = model, device, tokens, pipeline
        # Each stage's own forward, given a share of tokens and, but for the first, hidden states in their place.
        self.stages = {
            number: Forward(stage, device, tokens, is_critic, RouterLoad(stage))  # type: ignore[arg-type]
            for number, stage in zip(model.numbers, model.stages, strict=True)
        }
        self.last_stage = model.plan.n_stages - 1
        self.last_rank = model.plan.rank_of(self.last_stage)
        self._tie = _tied_group(model, tokens.ranks, device)

    @property
    def ranks(self) -> Ranks:
        return self.tokens.ranks

    @property
    def loads(self) -> list[RouterLoad]:
        """As `Forward.loads`, one for each stage of this rank."""
        return [stage.load for stage in self.stages.values()]

    @property
    def is_last(self) -> bool:
        return self.last_stage in self.stages

    def accumulate(
        self,
        parts: Sequence[PackedBatch],
        loss_fn: LossFn,
        loss_weight_fn: LossWeightFn,
        denominator: float,
        temperature: float,
        reduce_every: bool,
    ) -> tuple[Tensor, MetricSums]:
        """As `Forward.accumulate`; the loss and the metrics are whole on the last stage's ranks, else empty."""
        total, metrics = torch.zeros((), dtype=torch.float64, device=self.device), MetricSums()

        def finish(forward: Forward, mb: PackedBatch) -> Tensor:
            loss, extra = forward.loss(mb, loss_fn, temperature, fuse=self.model.plan.schedule not in SPLIT_BACKWARD)
            loss = loss / denominator
            total.add_(loss.detach())
            metrics.add(extra)
            return loss

        self._run(self.pipeline.backward, parts, finish)
        self._reduce_tied()
        return total, metrics

    def evaluate(
        self, parts: Sequence[PackedBatch], loss_fn: LossFn, denominator: float, temperature: float
    ) -> tuple[Tensor, MetricSums]:
        """As `Forward.evaluate`, on the last stage's ranks."""
        total, metrics = torch.zeros((), dtype=torch.float64, device=self.device), MetricSums()

        def finish(forward: Forward, mb: PackedBatch) -> Tensor:
            loss, extra = forward.loss(mb, loss_fn, temperature)
            total.add_(loss / denominator)
            metrics.add(extra)
            return total

        with whole_afterwards(self.model):
            self._run(self.pipeline.forward, parts, finish)
        return total, metrics

    def scores(
        self, parts: Sequence[PackedBatch], temperature: float, entropy: bool, only_trained: bool
    ) -> list[list[Tensor]]:
        """As `Forward.scores`, on every rank."""
        results: list[list[Tensor]] = []

        def finish(forward: Forward, mb: PackedBatch) -> Tensor:
            results.append(forward.score(mb, temperature, entropy, only_trained))
            return mb.tokens

        with whole_afterwards(self.model):
            self._run(self.pipeline.forward, parts, finish)
        first = results[0][0] if results else None
        dtype, columns = self._agree(
            None if first is None else [str(first.dtype).removeprefix("torch."), len(results[0])]
        )
        for index, mb in enumerate(parts):
            if not self.is_last:
                results.append(
                    [torch.empty(mb.n_tokens, dtype=getattr(torch, dtype), device=self.device) for _ in range(columns)]
                )
            for column in results[index]:
                dist.broadcast(column, group=self.ranks.pp.process_group, group_src=self.last_rank)
        return results

    def read(self, sums: MetricSums, alike: Mapping[str, Tensor] | None = None, **scalars: Tensor) -> dict[str, float]:
        """As `MetricSums.read`, on every rank: the last stage's ranks tell the others, also what went wrong there."""
        values: Any = None
        if self.is_last:
            try:
                values = sums.read(self.ranks, None, **scalars)
            except RuntimeError as error:
                self._agree(str(error))
                raise
        values = self._agree(values)
        if isinstance(values, str):
            raise RuntimeError(values)
        return values | {name: float(value) for name, value in (alike or {}).items()}

    def _agree(self, value: Any) -> Any:
        """What the last stage's rank holds, numbers and names, on all ranks of the pipeline."""
        group, source = self.ranks.pp.process_group, self.last_rank
        text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=self.device)
        size = torch.tensor(text.numel(), device=self.device)
        dist.broadcast(size, group=group, group_src=source)
        if not self.is_last:
            text = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        dist.broadcast(text, group=group, group_src=source)
        return json.loads(bytes(text.tolist()))

    def _run(
        self,
        through: Callable[..., None],
        parts: Sequence[PackedBatch],
        finish: Callable[[Forward, PackedBatch], Tensor],
    ) -> None:
        """All micro-batches through the pipeline, `finish` being what the last stage does with each but the idle ones,
        which take part in every collective and in nothing else."""
        count = self.ranks.most(len(parts), self.device)
        count = self.model.plan.micro_batches(count) if through == self.pipeline.backward else count
        least = max(self.tokens.rows(mb.lengths) for mb in parts)
        batches = [mb.to(self.device) for mb in parts]

        def run(stage: int, index: int, hidden: Tensor | None) -> Tensor:
            idle = index >= len(batches)
            mb, forward = batches[0 if idle else index], self.stages[stage]
            forward = forward.with_input(hidden, least)
            with phase("forward"):
                if stage < self.last_stage:
                    out = forward.hidden(mb)
                else:
                    out = forward.idle(mb) if idle else finish(forward, mb)
            if not idle:
                forward.load.add()
            return out

        through(run, count, least // self.ranks.tp.size)

    def _reduce_tied(self) -> None:
        """First and last stage each found a part of the gradient of the one matrix they both hold."""
        if self._tie is None:
            return
        named = dict(self.model.named_parameters())
        own = [named[name] for name in ("tok_embeddings.weight", "output.weight") if name in named]
        if not own:
            return
        grads = [local_tensor(p.grad) for p in own if p.grad is not None]
        total = torch.stack(grads).sum(0)
        if self._tie.size > 1:
            dist.all_reduce(total, group=self._tie.process_group)
        for grad in grads:
            grad.copy_(total)


def _tied_group(model: StagedModel, ranks: Ranks, device: torch.device) -> Group | None:
    """The ranks of a pipeline that hold the embedding and the head of a tied model; None for an untied one."""
    args: Any = model.stages[0].args
    if not args.tie_word_embeddings or args.is_critic:
        return None
    ends = sorted({model.plan.rank_of(0), model.plan.rank_of(model.plan.n_stages - 1)})
    if len(ends) == 1:
        return SOLO
    if len(ends) == ranks.pp.size:
        return ranks.pp
    members = dist.get_process_group_ranks(ranks.pp.process_group)
    mine = torch.tensor([members[end] for end in ends], device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    own = SOLO
    for pair in sorted({tuple(pair.tolist()) for pair in everyone}):
        group = dist.new_group(list(pair))
        if dist.get_rank() in pair:
            own = Group(group.group_name, 2, pair.index(dist.get_rank()))
    return own
