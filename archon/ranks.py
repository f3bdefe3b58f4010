"""The ranks of a run: who holds which documents and which of their tokens, and what is summed over whom."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from archon.failure import Failure
from archon.models.attention.context import GatheredAttention, SharedAttention, UlyssesAttention
from archon.models.attention.meta import PackedAttention
from archon.parallel.agreement import AGREEMENT
from archon.parallel.comm import Group, all_reduce
from archon.parallel.context import ContextPlan, SequenceShare, contiguous_plan, ulysses_repeat, zigzag_plan
from archon.parallel.dims import ArchonParallelDims
from archon.parallel.gloo import use_single_worker_gloo
from archon.schema.config import AttnType, ContextParallelKind
from archon.schema.errors import BatchError, LayoutError, UserError
from archon.world import World

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

SOLO = Group("", 1, 0)


@dataclass(frozen=True)
class Ranks:
    """The groups of this rank that the engine communicates over. `dp` ranks hold different documents; those of one
    `cp`, `tp` and `pp` group are given the same ones."""

    pp: Group = SOLO
    dp: Group = SOLO
    cp: Group = SOLO
    tp: Group = SOLO

    @classmethod
    def of(cls, dims: ArchonParallelDims) -> Ranks:
        """Makes the process groups; every rank must call it."""
        if dims.world_size == 1:
            return cls()
        groups = {name: Group.of(dims.get_mesh(name)) for name in ("pp", "dp", "cp", "tp")}
        return cls(**{name: group if group.size > 1 else SOLO for name, group in groups.items()})

    @property
    def split_tokens(self) -> bool:
        """Whether a rank holds a part of a micro-batch's tokens."""
        return self.cp.size * self.tp.size > 1

    def sum(self, values: Tensor, groups: Sequence[Group]) -> Tensor:
        """The sum of a tensor over the ranks of each group in turn."""
        for group in groups:
            values = all_reduce(values, group)
        return values

    def most(self, number: int, device: torch.device) -> int:
        """The largest of the data-parallel ranks' numbers."""
        if self.dp.size == 1:
            return number
        return int(all_reduce(torch.tensor(number, device=device), self.dp, "max"))

    def require_on_all(self, prepare: Callable[[], Result], device: torch.device) -> Result:
        """This rank's `prepare()`, once it has gone well on every data-parallel rank. Where one refuses its share by a
        `UserError` all of them raise: that rank its own error, the others a BatchError with its number and message."""
        if self.dp.size == 1:
            return prepare()
        try:
            result = prepare()
        except UserError as error:
            self.most(1, device)
            World.now().gather(str(error).encode())
            raise
        if self.most(0, device):
            messages = [data.decode() for data in World.now().gather(b"")]
            rank, message = next((rank, text) for rank, text in enumerate(messages) if text)
            raise BatchError(f"rank {rank} refused its share of the batch: {message}")
        return result


@dataclass(frozen=True)
class TokenSplit:
    """How a micro-batch's tokens are dealt out to the ranks that share it."""

    ranks: Ranks
    kind: ContextParallelKind
    attn_type: AttnType

    def share(self, lengths: tuple[int, ...], device: torch.device, least: int = 0) -> SequenceShare:
        """This rank's tokens of a pack of documents of `lengths`; at least `least` a rank."""
        return SequenceShare(self._plan(lengths, least), self.ranks.cp, self.ranks.tp, device)

    def rows(self, lengths: tuple[int, ...]) -> int:
        """The tokens a context-parallel rank holds of a pack, padding included."""
        return sum(stop - start for _, start, stop in self._plan(lengths, 0).chunks[0])

    def _plan(self, lengths: tuple[int, ...], least: int) -> ContextPlan:
        plan = zigzag_plan if self.ranks.cp.size > 1 and self.kind == "allgather" else contiguous_plan
        return plan(lengths, self.ranks.cp.size, self.ranks.tp.size, least)

    def attention(self, share: SequenceShare) -> SharedAttention | PackedAttention:
        """How those tokens attend."""
        if self.ranks.cp.size > 1:
            attention = GatheredAttention if self.kind == "allgather" else UlyssesAttention
            return attention(share, self.attn_type)
        lengths = share.plan.lengths
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(share.index.device, torch.int32)
        meta = PackedAttention(bounds, max(lengths), self.attn_type, lengths)
        meta.counted = share.counted
        return meta


def context_parallel_kind(kind: str, cp: int, tp: int, heads: int, key_heads: int) -> ContextParallelKind:
    """`auto` is Ulysses where the heads can be dealt to the ranks, else all-gather; LayoutError for an impossible
    choice."""
    if kind == "allgather" or cp == 1:
        return "allgather"
    try:
        ulysses_repeat(heads // tp, max(1, key_heads // tp), cp)
    except LayoutError:
        if kind == "ulysses":
            raise
        logger.info("context parallelism gathers keys: cp = %d does not divide the heads", cp)
        return "allgather"
    return "ulysses"


def started_processes() -> int:
    """How many processes torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def require_processes(world_size: int) -> None:
    """LayoutError unless as many processes run as the layout needs."""
    running = started_processes()
    if dist.is_initialized():
        running = dist.get_world_size()
    if running != world_size:
        raise LayoutError(
            f"the layout needs {world_size} processes, but {running} are running; "
            f"start it with torchrun --nproc-per-node {world_size} -m archon …, or set a layout of {running}, such as "
            f"d{running}, for every model of the run"
        )


def join_process_group(world_size: int, device_type: str, timeout_s: float) -> None:
    """Join the process group that torchrun has prepared, and end with it; LayoutError where it has prepared none, or
    another size."""
    require_processes(world_size)
    if world_size == 1 or dist.is_initialized():
        return
    rank = int(os.environ["RANK"])
    logging.basicConfig(format=f"archon: rank {rank}: %(message)s", level=logging.WARNING)
    failure = Failure.connect()
    if failure is not None:
        failure.watch()
        atexit.register(failure.done)
    use_single_worker_gloo()
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def limit_collectives(timeout_s: float) -> None:
    """Let no collective of any group take longer, but of those that wait for files and rollouts (`Agreement`); a group
    that a mesh has made does not inherit the default group's limit."""
    limit = timedelta(seconds=timeout_s)
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.group_desc.startswith(AGREEMENT):
            continue
        for device in group._device_types:
            backend = group._get_backend(device)
            if hasattr(backend, "_set_default_timeout"):  # a fake group waits for nobody
                backend._set_default_timeout(limit)


def own_gpu() -> torch.device:
    """The GPU of this process: the one of torchrun's LOCAL_RANK, else the current one; LayoutError where there are
    fewer GPUs than processes."""
    local = os.environ.get("LOCAL_RANK")
    if local is not None and started_processes() > 1:
        if int(local) >= torch.cuda.device_count():
            raise LayoutError(
                f"process {local} of this machine has no GPU: PyTorch sees {torch.cuda.device_count()}; start at most "
                "as many processes a machine (--nproc-per-node), or set device to cpu"
            )
        torch.cuda.set_device(int(local))
    return torch.device("cuda", torch.cuda.current_device())
