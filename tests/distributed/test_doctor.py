"""What the doctor must find, planted on real ranks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from archon.engine.batch import PackedBatch
from archon.engine.dry_run import documents
from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.parallel.fsdp import local_tensor
from archon.parallel.layout import parse_layout
from archon.schema.config import EngineConfig
from archon.tools.check.rank_pool import Pool
from archon.tools.doctor.checks import memory, placements, replica_mismatches, self_test
from tests.distributed.cases import write_config

pytestmark = pytest.mark.xdist_group("ranks")
TOKENS = 64


def built(path: str, layout: str, **options: Any) -> ArchonEngine:
    base = {"path": path, "layout": layout, "device": "cpu", "init_from_scratch": True}
    engine = ArchonEngine(EngineConfig.model_validate(base | options))
    engine.initialize()
    return engine


def step(engine: ArchonEngine, loss: CrossEntropyLoss) -> None:
    engine.train_batch(documents(engine.args.vocab_size, TOKENS), loss, loss_token_count)


def plant_copy(path: str, layout: str, rank: int, name: str) -> tuple[list[str], list[str]]:
    """What is found after a step, and once one rank's weight has moved by its last bit."""
    engine = built(path, layout)
    step(engine, CrossEntropyLoss())
    before = replica_mismatches(engine)
    if dist.get_rank() == rank:
        parameters = dict(engine.model.named_parameters(remove_duplicate=False))
        first = local_tensor(parameters[name].detach()).view(-1)[:1]
        first.copy_(torch.nextafter(first, torch.tensor(torch.inf)))
    return before, replica_mismatches(engine)


@pytest.mark.parametrize(
    ("layout", "model", "rank", "name", "copies"),
    [
        ("t4", "dense", 2, "layers.1.attention_norm.weight", {0, 1, 2, 3}),
        ("r2d2", "dense", 3, "layers.0.attention.wq.weight", {1, 3}),
        ("p2t2", "tied", 3, "output.weight", {1, 3}),
        ("d4e2", "moe", 0, "layers.2.moe.router.gate.weight", set()),
    ],
)
def test_a_copy_that_differs_is_named(
    layout: str, model: str, rank: int, name: str, copies: set[int], ranks: Callable[[int], Pool], tmp_path: Path
) -> None:
    found = ranks(4).run(plant_copy, write_config(tmp_path, model), layout, rank, name)
    before, after = found[0]
    assert before == []
    assert all(per_rank == found[0] for per_rank in found), "every rank says the same"
    if not copies:
        assert after == [], "a shard has no copy to differ from"
        return
    (line,) = after
    told = "tok_embeddings.weight" if name == "output.weight" else name
    assert line.startswith(f"{told}: rank")
    assert {int(digit) for digit in line.removeprefix(told) if digit.isdigit()} == copies
    if len(copies) > 2:
        assert f"rank {rank} differ" in line


class _Corrupting(TorchDispatchMode):
    """Adds 1 to what this rank receives in one kind of collective over groups of one size."""

    def __init__(self, kind: str, size: int) -> None:
        super().__init__()
        self.kind, self.size = kind, size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._opname == self.kind and self.size in args[1:]:
            return torch.ops._c10d_functional.wait_tensor(out) + 1
        return out


def plant_group(path: str, layout: str, rank: int) -> tuple[list[str], list[str]]:
    dims = parse_layout(layout).dims()
    well = self_test(dims, torch.device("cpu"))
    with _Corrupting("reduce_scatter_tensor", dims.tp) if dist.get_rank() == rank else nullcontext():
        return well, self_test(dims, torch.device("cpu"))


def test_a_group_that_gives_wrong_results_is_named(ranks: Callable[[int], Pool], tmp_path: Path) -> None:
    for well, ill in ranks(4).run(plant_group, write_config(tmp_path, "dense"), "t4", 2):
        assert well == []
        assert "reduce_scatter over tp is wrong on rank 2" in ill
        assert all(line.startswith("reduce_scatter") and line.endswith("rank 2") for line in ill)


class _Dawdling(CrossEntropyLoss):
    def token_weights(self, mb: PackedBatch) -> Tensor:
        if dist.get_rank() == 1:
            dawdle()
        return super().token_weights(mb)


def dawdle() -> None:
    time.sleep(3.0)


def stall(path: str, folder: str) -> None:
    engine = warmed_up(path, folder)
    step(engine, _Dawdling())
    engine.stall_watch.seconds = 120.0
    step(engine, CrossEntropyLoss())


def warmed_up(path: str, folder: str) -> ArchonEngine:
    """Return an engine that has taken a step, so that later ones are fast, and is watched from now on."""
    engine = built(path, "d2", stall_s=120.0)
    engine.stall_watch.folder = Path(folder)
    step(engine, CrossEntropyLoss())
    engine.stall_watch.seconds = 1.0
    return engine


def sleep_between_steps(path: str, folder: str) -> list[str]:
    """Return the text of this rank's file after a sleep, another sleep, and a step in time."""
    engine, texts = warmed_up(path, folder), []
    for nap in (dawdle, dawdle, int):
        if dist.get_rank() == 1:
            nap()
        step(engine, CrossEntropyLoss())
        texts.append(engine.stall_watch.path.read_text())
    return texts


@pytest.mark.slow
def test_a_step_that_stalls_leaves_every_ranks_stacks(ranks: Callable[[int], Pool], tmp_path: Path) -> None:
    ranks(2).run(stall, write_config(tmp_path / "model", "dense"), str(tmp_path / "stacks"))
    waiting, sleeping = ((tmp_path / "stacks" / f"rank{rank}.txt").read_text() for rank in (0, 1))
    assert "in dawdle" in sleeping and "in dawdle" not in waiting
    assert "in train_batch" in waiting and "in train_batch" in sleeping


@pytest.mark.slow
def test_a_rank_asleep_between_steps_leaves_its_stacks_when_another_waits_for_it(
    ranks: Callable[[int], Pool], tmp_path: Path
) -> None:
    arguments = write_config(tmp_path / "model", "dense"), str(tmp_path / "stacks")
    waiting, sleeping = ranks(2).run(sleep_between_steps, *arguments)
    for times, text in enumerate(sleeping[:2], start=1):
        assert text.count("rank 0 takes longer than 1 s; rank 1 is between steps") == text.count("in dawdle") == times
        assert "in train_batch" not in text
    assert "in train_batch" in waiting[0] and "in dawdle" not in waiting[0]
    assert (waiting[1], sleeping[1]) == (waiting[2], sleeping[2])


def test_a_step_in_time_leaves_nothing(ranks: Callable[[int], Pool], tmp_path: Path) -> None:
    ranks(2).run(quick, write_config(tmp_path / "model", "dense"), str(tmp_path / "stacks"))
    assert list((tmp_path / "stacks").iterdir()) == []


def quick(path: str, folder: str) -> None:
    engine = built(path, "d2", stall_s=120.0)
    engine.stall_watch.folder = Path(folder)
    step(engine, CrossEntropyLoss())


def lie(path: str, layout: str) -> tuple[list[Any], list[Any]]:
    engine = built(path, layout)
    step(engine, CrossEntropyLoss())
    return placements(engine), memory(engine)


def test_placements_and_memory(ranks: Callable[[int], Pool], tmp_path: Path) -> None:
    found, held = ranks(4).run(lie, write_config(tmp_path, "dense"), "d2t2")[0]
    by_name = {of.name: of for of in found}
    wq = by_name["layers.*.attention.wq.weight"]
    assert (wq.count, wq.shape, wq.local, wq.sharded, wq.uneven) == (4, (80, 48), (20, 48), True, False)
    assert wq.places == ("dp_shard_cp: dim 0", "tp: dim 0")
    assert "tp: copies" in by_name["layers.*.attention_norm.weight"].places
    assert len(held) == 4 and all(of.optimizer >= 2 * of.parameters > 0 for of in held)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_command_under_torchrun(tmp_path: Path) -> None:
    path = write_config(tmp_path, "tied")
    options = ["--layout", "t2", "--dtype", "float32", "--fresh", "--tokens", str(TOKENS)]
    done = run(
        "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "archon", "doctor", path, *options
    )
    assert done.returncode == 0, done.stderr
    for line in (
        "group tp: ranks [0, 1]",
        "collectives: correct in every group",
        "replicas as loaded: bitwise equal",
        "replicas after a step: bitwise equal",
    ):
        assert line in done.stdout


@pytest.mark.slow
def test_the_command_foretells_a_rank(tmp_path: Path) -> None:
    path = write_config(tmp_path, "moe")
    done = run("archon", "doctor", path, "--layout", "d16e8", "--rank", "5", "--tokens", str(TOKENS))
    assert done.returncode == 0, done.stderr
    assert "rank 5 of 16" in done.stdout and "all_to_all" in done.stdout
    done = run("archon", "doctor", path, "--layout", "d16e8", "--rank", "16")
    assert done.returncode == 2 and "ranks 0 to 15, got rank 16" in done.stderr
