"""megatron-core's real GPTModel on a CPU, in a process of its own: `python -m tests.checkpoint.megatron_ranks WHAT …`

logits OUT FOLDER…               of TOKENS by each checkpoint, saved as a list
ranks FOLDER TP PP EP RANK       the names and shapes of this rank's state dict, after its weights were loaded
tensor FOLDER OUT RANK STORE TP  logits [1, T, V] of TOKENS by one of TP real ranks, gathered; rank 0 saves them
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from archon.checkpoint.formats.megatron.sharding import MegatronLayout, RankCoordinates
from benchmarks.peer_models import causal_mask, megatron_model, megatron_on_a_cpu, megatron_rank

TOKENS = torch.arange(3, 59, 5)


@torch.no_grad()
def run(model: Any) -> Tensor:
    length = len(TOKENS)
    return model.eval()(TOKENS[None], torch.arange(length)[None], causal_mask(length))


def logits(out: str, *folders: str) -> None:
    found = []
    for folder in folders:
        found.append(run(megatron_model(folder)))
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    torch.save(found, out)


def parallel(backend: str, layout: MegatronLayout, rank: int, size: int, store: Any) -> RankCoordinates:
    """Megatron's parallel state of one of `size` ranks; returns its coordinates."""
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        create_gloo_process_groups=False,
    )
    return RankCoordinates(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )


def ranks(*cases: str) -> None:
    """Of each FOLDER:TP:PP:EP build every rank's model and load its weights, which must be all it has."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    megatron_on_a_cpu()
    for case in cases:
        folder, *degrees = case.split(":")
        layout, seen = MegatronLayout(*map(int, degrees)), set[RankCoordinates]()
        size = layout.tp * layout.pp * layout.ep
        for number in range(size):
            rank = parallel("fake", layout, number, size, FakeStore())
            megatron_rank(folder, layout, rank)
            seen.add(rank)
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
        assert seen == {*layout.ranks()}, (case, seen)


def tensor(folder: str, out: str, rank: str, tp: str, store: str) -> None:
    megatron_on_a_cpu()
    layout = MegatronLayout(int(tp))
    where = parallel("gloo", layout, int(rank), layout.tp, torch.distributed.FileStore(store, layout.tp))
    own = run(megatron_rank(folder, layout, where)).contiguous()
    parts = [torch.empty_like(own) for _ in range(layout.tp)]
    torch.distributed.all_gather(parts, own)
    if where.tp == 0:
        torch.save(torch.cat(parts, -1), out)


if __name__ == "__main__":
    {"logits": logits, "ranks": ranks, "tensor": tensor}[sys.argv[1]](*sys.argv[2:])
