"""Dry run of one rank of a layout with fake tensors and a fake process group.

Fake tensors have a shape and no memory; PyTorch's fake process group sends nothing. The dry run builds the shards of
the rank and calls `ArchonEngine.train_batch`. `archon.engine.fake_execution` says which values a step reads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from archon.engine.batch import PackedBatch, pack
from archon.engine.engine import ArchonEngine
from archon.engine.fake_execution import FakeExecution, round_robin
from archon.engine.forkserver import forkserver_context, replace_environment
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.models.layers.moe import Router
from archon.parallel.collectives import CollectiveRecorder, CollectiveStats, CollectiveType, group_names
from archon.parallel.fsdp import local_tensor
from archon.parallel.layout import parse_layout
from archon.parallel.pipeline import StagedModel
from archon.parallel.torch_private import FakeTensorMode, join_fake_group
from archon.schema.config import EngineConfig
from archon.schema.errors import ConfigError, LayoutError

# Tokens of a document in a fake step: one call of the attention kernel.
DOCUMENT = 64
# End of the learning-rate schedule: later than any warm-up.
TOTAL_STEPS = 10**9


@dataclass(frozen=True)
class RankReport:
    """Memory and communication of one rank of a layout.

    Attributes:
        stages: the rank's pipeline stages, as (first layer, layer after the last).
        parameters: trained parameters in this rank's shards.
        parameter_bytes: bytes of these shards.
        gradient_bytes: bytes of their gradients.
        optimizer_bytes: bytes of their moments.
        step: collectives of a training step: forward and backward of each micro-batch, norm, clipping and metrics.
    """

    rank: int
    stages: tuple[tuple[int, int], ...]
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    step: dict[CollectiveType, CollectiveStats]


def dry_run(config: EngineConfig, rank: int, tokens: int, micro_batches: int = 1) -> RankReport:
    """Return the memory and communication of a rank in a step on `micro_batches` of `tokens` each.

    It reads only config.json, allocates no weights and runs in a separate process.

    Raises:
        LayoutError: the layout has no such rank.
    """
    layout = parse_layout(config.layout)
    if not 0 <= rank < layout.world_size:
        raise LayoutError(f"layout {layout} has ranks 0 to {layout.world_size - 1}, got rank {rank}")
    if config.optimizer is None:
        raise ConfigError("a dry run takes a training step, and optimizer is null; leave it out")
    # torch caches meshes for the life of a process, and this process may already have a process group.
    with ProcessPoolExecutor(1, forkserver_context(), replace_environment, (dict(os.environ),)) as process:
        return process.submit(_dry_run, dry_run_config(config, tokens), rank, tokens, micro_batches).result()


def dry_run_config(config: EngineConfig, tokens: int) -> EngineConfig:
    """Return the config of a fake step of micro-batches of `tokens`; a fake process group cannot report stalls."""
    changes = {"device": "cpu", "compile": False, "init_from_scratch": True, "stall_s": None}
    return config.model_copy(update=changes | {"max_tokens_per_mb": tokens})


def _dry_run(config: EngineConfig, rank: int, tokens: int, micro_batches: int) -> RankReport:
    engine, recorder = fake_step(config, rank, tokens, micro_batches)
    return rank_report(engine, rank, recorder.sums)


def fake_step(
    config: EngineConfig,
    rank: int,
    tokens: int,
    micro_batches: int,
    watch: Callable[[ArchonEngine], AbstractContextManager[object]] = lambda engine: nullcontext(),
) -> tuple[ArchonEngine, CollectiveRecorder]:
    """Take a fake step inside `watch(engine)` in this process, which must have no process group."""
    dims = parse_layout(config.layout).dims()
    if dims.world_size > 1:
        join_fake_group(rank, dims.world_size)
    recorder = FakeExecution(group_names(dims))
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        engine = ArchonEngine(config)
        engine.initialize(total_steps=TOTAL_STEPS)
        for module in engine.model.modules():
            if isinstance(module, Router):
                module.register_forward_hook(round_robin)
        recorder.sums.clear()
        batch = documents(engine.args.vocab_size, tokens, micro_batches)
        with watch(engine):
            engine.train_batch(batch, CrossEntropyLoss(), loss_token_count)
    return engine, recorder


def documents(vocab_size: int, tokens: int, micro_batches: int = 1) -> PackedBatch:
    """Return documents of DOCUMENT tokens that fill `micro_batches` of `tokens`; every token is trained.

    Attention within a document sends nothing, so document lengths do not matter.
    """
    last = [tokens % DOCUMENT] if tokens % DOCUMENT else []
    lengths = torch.tensor(([DOCUMENT] * (tokens // DOCUMENT) + last) * micro_batches)
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    ids = torch.arange(mask.numel()).view(mask.shape) % vocab_size
    return pack({"input_ids": ids * mask, "attention_mask": mask, "loss_mask": mask.long()})


def rank_report(engine: ArchonEngine, rank: int, step: Mapping[CollectiveType, CollectiveStats]) -> RankReport:
    """Return the report of an engine after a step."""
    shards = [local_tensor(parameter) for parameter in engine.model.parameters() if parameter.requires_grad]
    assert engine.optimizer is not None
    state = [local_tensor(x) for per in engine.optimizer.state.values() for x in per.values() if isinstance(x, Tensor)]
    parameter_bytes = sum(x.nbytes for x in shards)
    stages: tuple[tuple[int, int], ...] = ((0, engine.args.n_layers),)
    if isinstance(engine.model, StagedModel):
        stages = tuple(engine.model.plan.layers[number] for number in engine.model.numbers)
    moment_bytes = sum(x.nbytes for x in state if x.dim())  # a step count is a scalar
    parameters, collectives = sum(x.numel() for x in shards), dict(sorted(step.items()))
    return RankReport(rank, stages, parameters, parameter_bytes, parameter_bytes, moment_bytes, collectives)
