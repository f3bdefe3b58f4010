"""What ranks must agree on, and what they are told when they do not."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from archon.engine.batch import PackedBatch
from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, Metrics, loss_token_count
from archon.parallel.agreement import AGREEMENT, Agreement
from archon.parallel.failure import Failure
from archon.parallel.layout import parse_layout
from archon.parallel.world import World
from archon.schema.errors import ConfigError
from tests.distributed.cases import Case, engine_config, rows_of
from tests.distributed.matrix import data_of
from tests.distributed.pool import Pool

pytestmark = pytest.mark.xdist_group("ranks")


class _NamedByRank(CrossEntropyLoss):
    """A metric whose name only this rank uses."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def metrics(self, logprobs: torch.Tensor, mb: PackedBatch) -> Metrics:
        (value,) = super().metrics(logprobs, mb).values()
        return {f"seen_by_{self.rank}": value}


def train_with_other_names(folder: str, layout: str) -> tuple[int, str]:
    engine = ArchonEngine(engine_config(Case(layout), f"{folder}/checkpoint", layout))
    engine.initialize()
    rank = engine.ranks.dp.rank
    try:
        engine.train_batch(rows_of(data_of(0), rank, 2), _NamedByRank(rank), loss_token_count)
    except RuntimeError as error:
        return rank, str(error)
    return rank, "no error"


@pytest.mark.parametrize("layout", ["d2", "d2p2"])
def test_metrics_of_other_names_end_every_rank(
    ranks: Callable[[int], Pool], reference: Callable[[Case], Path], layout: str
) -> None:
    """Of a pipeline also the ranks of its first stage, which know no metric."""
    folder = str(reference(Case(layout)))
    world_size = parse_layout(layout).world_size
    for rank, message in ranks(world_size).run(train_with_other_names, folder, layout, timeout=60.0):
        assert f"this one loss, tokens, seen_by_{rank}" in message


def gloo_threads(folder: str) -> tuple[set[int], int, set[float]]:
    """Worker threads of each process group, threads of this process that wait for the network, and the limits in
    seconds of the groups that train."""
    Agreement.of_world("saves").share("")  # which waits for files, and keeps its own
    engine = ArchonEngine(engine_config(Case("d2"), f"{folder}/checkpoint", "d2", timeout_s=217.0))
    engine.initialize()
    groups = list(torch.distributed.distributed_c10d._world.pg_map)
    options = {group: group._get_backend(torch.device("cpu")).options for group in groups}
    train = [of for group, of in options.items() if not group.group_desc.startswith(AGREEMENT)]
    assert 10 < len(train) < len(groups)
    workers, limits = {of._threads for of in options.values()}, {of._timeout.total_seconds() for of in train}
    agree = {of._timeout.total_seconds() for of in options.values() if of not in train}
    assert agree == {1800.0}
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread may end meanwhile
            names.append((task / "comm").read_text().strip())
    return workers, names.count("gloo_tcp_loop"), limits


def test_gloo_groups_have_one_worker_and_share_a_device(
    ranks: Callable[[int], Pool], reference: Callable[[Case], Path]
) -> None:
    """Two workers of a group corrupt the heap (see `archon.parallel.gloo`). Every group keeps to `timeout_s`."""
    assert ranks(2).run(gloo_threads, str(reference(Case("d2")))) == [({1}, 1, {217.0})] * 2


def compare(_: str) -> list[str]:
    World.now().require_same("train.jsonl", "5 rows")
    messages = []
    for values in (("5 rows", "6 rows"), ("", "6 rows")):
        try:
            World.now().require_same("train.jsonl", values[World.now().rank])
        except ConfigError as error:
            messages.append(str(error))
    return messages


def test_other_files_on_another_rank_are_an_error_everywhere(ranks: Callable[[int], Pool], tmp_path: Path) -> None:
    """Rows, or a checkpoint, that differ between machines would be trained into one model."""
    for messages in ranks(2).run(compare, str(tmp_path)):
        assert messages == [
            "train.jsonl: rank 1 has 6 rows, rank 0 has 5 rows; every machine needs the same files",
            "train.jsonl: rank 1 has 6 rows, rank 0 has ; every machine needs the same files",
        ]


def test_an_ended_rank_watches_no_more() -> None:
    """A thread that is still within the store when Python ends aborts the process."""
    failure = Failure(0, range(1), torch.distributed.HashStore())
    failure.watch()
    failure.done()
    assert "archon-failure" not in {thread.name for thread in threading.enumerate()}


def test_tests_of_ranks_share_one_worker(request: pytest.FixtureRequest) -> None:
    """Two workers with eight ranks each would fight for the cores; some versions of pytest lose the groups."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        assert request.node.nodeid.endswith("@ranks")
