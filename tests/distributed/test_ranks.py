"""What ranks must agree on, and what they are told when they do not."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.engine.batch import PackedBatch
from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, Metrics, loss_token_count
from archon.parallel.control_plane import LONG_TIMEOUT_PREFIX, ControlPlane
from archon.parallel.failure import FailureMonitor, end_stopped_children
from archon.parallel.layout import parse_layout
from archon.parallel.mesh import default_group
from archon.parallel.torch_private import all_groups, set_time_limit, time_limit
from archon.schema.errors import CheckpointError, ConfigError
from archon.tools.check.layouts import rank_rows
from archon.tools.check.rank_pool import Pool
from tests.distributed.cases import Case, engine_config
from tests.distributed.matrix import data_of

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
        engine.train_batch(rank_rows(data_of(0), rank, 2), _NamedByRank(rank), loss_token_count)
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
        assert f"this one loss, tokens, tokens_computed, seen_by_{rank}" in message


def gloo_threads(folder: str) -> tuple[set[int], int, set[float]]:
    """Worker threads of each process group, threads of this process that wait for the network, and the limits in
    seconds of the groups that train."""
    ControlPlane.with_long_timeout("saves").barrier()  # which waits for files, and keeps its own
    engine = ArchonEngine(engine_config(Case("d2"), f"{folder}/checkpoint", "d2", timeout_s=217.0))
    engine.initialize()
    groups = all_groups()
    options = {group: group._get_backend(torch.device("cpu")).options for group in groups}
    train = [of for group, of in options.items() if not group.group_desc.startswith(LONG_TIMEOUT_PREFIX)]
    assert 1 < len(train) < len(groups)
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


def talk(_: str) -> list[Any]:
    """What each way of telling one another gives on this rank."""
    plane = ControlPlane.world()
    rank = plane.rank

    def fails_on_rank_1() -> str:
        if rank == 1:
            raise ZeroDivisionError("no such number")
        return "done"

    try:
        plane.run_on_all(fails_on_rank_1)
        raised = ""
    except (CheckpointError, ZeroDivisionError) as error:
        raised = f"{type(error).__name__}: {error}"
    done: list[int] = []
    plane.main_first(lambda: done.append(rank))
    return [
        plane.broadcast_json(lambda: {"said by": rank}, source=1),
        plane.gather(b"x" * rank),
        plane.all_gather(f"of {rank}".encode()),
        plane.all_gather_tensor(torch.tensor([rank])).tolist(),
        plane.all_reduce_max(5 - rank),
        plane.run_on_all(lambda: rank),
        raised,
        done,
    ]


def test_ranks_tell_one_another(ranks: Callable[[int], Pool], tmp_path: Path) -> None:
    told = [{"said by": 1}, [b"of 0", b"of 1"], [[0], [1]], 5]
    first, second = ranks(2).run(talk, str(tmp_path))
    assert [first[0], *first[2:5]] == [second[0], *second[2:5]] == told
    assert (first[1], second[1]) == ([b"", b"x"], [])
    assert (first[5], second[5]) == (0, 1)
    assert first[6] == "CheckpointError: rank 1 failed: ZeroDivisionError: no such number"
    assert second[6] == "ZeroDivisionError: no such number"
    assert (first[7], second[7]) == ([0], [])


def talk_in_two_threads(_: str) -> list[int]:
    """A thread tells the others something on a plane of its own while the main thread does on its own."""
    found: list[int] = []
    saves, run = ControlPlane.with_long_timeout("saves"), ControlPlane.world()
    saves.barrier()  # groups are made by the main thread

    def save() -> None:
        found.extend(saves.all_reduce_max(number) for number in range(200))

    thread = threading.Thread(target=save)
    thread.start()
    own = [run.all_reduce_max(number) for number in range(200)]
    thread.join()
    return found if found == own else []


def test_a_thread_talks_while_the_main_thread_does(ranks: Callable[[int], Pool], tmp_path: Path) -> None:
    assert ranks(2).run(talk_in_two_threads, str(tmp_path)) == [list(range(200))] * 2


def test_one_process_agrees_with_itself() -> None:
    plane = ControlPlane()
    assert (plane.is_main, plane.broadcast_json(lambda: [1]), plane.gather(b"a"), plane.all_gather(b"a")) == (
        True,
        [1],
        [b"a"],
        [b"a"],
    )
    assert plane.all_gather_tensor(torch.tensor([3])).tolist() == [[3]]


def limits(_: str) -> tuple[float, float, float]:
    """Seconds that planes wait which are made under a short limit, and a patient one under a long one."""
    world = default_group()
    before = time_limit(world)
    set_time_limit(world, timedelta(seconds=217))
    short = [plane.connect() for plane in (ControlPlane._create("a", False), ControlPlane._create("b", True))]
    set_time_limit(world, timedelta(seconds=7200))
    long = ControlPlane.with_long_timeout("c").connect()
    set_time_limit(world, before)
    return tuple(time_limit(group).total_seconds() for group in (*short, long))  # type: ignore[return-value]


def test_a_patient_plane_waits_half_an_hour_or_the_time_limit_where_that_is_longer(
    ranks: Callable[[int], Pool], tmp_path: Path
) -> None:
    assert ranks(2).run(limits, str(tmp_path)) == [(217.0, 1800.0, 7200.0)] * 2


def compare(_: str) -> list[str]:
    ControlPlane.world().require_same("train.jsonl", "5 rows")
    messages = []
    for values in (("5 rows", "6 rows"), ("", "6 rows")):
        try:
            ControlPlane.world().require_same("train.jsonl", values[ControlPlane.world().rank])
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
    failure = FailureMonitor(0, range(1), torch.distributed.HashStore())
    failure.watch()
    failure.mark_done()
    assert "archon-failure" not in {thread.name for thread in threading.enumerate()}


def test_a_rank_that_does_not_run_is_lost_after_the_time_limit() -> None:
    store = torch.distributed.HashStore()
    failure = FailureMonitor(2, range(2, 3), store, size=3, limit_s=1.5)

    def silent_after(seconds: float) -> int | None:
        failure._polled -= seconds
        return failure.silent_rank()

    assert silent_after(9.0) is None, "rank 0 has not started"
    store.set("alive/0", "1")
    assert [silent_after(0.9) for _ in range(3)] == [None, None, 0]
    store.set("alive/0", "2")
    assert silent_after(0.9) is None, "it runs again"
    assert silent_after(3600.0) is None, "this process was suspended too"
    assert silent_after(0.9) == 0
    store.set("done/0", "")
    assert silent_after(0.9) is None, "it has ended"


def test_only_stopped_ranks_of_the_run_are_killed() -> None:
    """They cannot react to SIGTERM. Other stopped jobs of the same shell are the user's."""
    processes = []
    for run, number in (("run", signal.SIGSTOP), ("run", signal.SIGCONT), ("other", signal.SIGSTOP)):
        processes.append(subprocess.Popen(["sleep", "60"], env=os.environ | {"TORCHELASTIC_RUN_ID": run, "RANK": "7"}))
        os.kill(processes[-1].pid, number)
    try:
        for stopped in (processes[0], processes[2]):
            os.waitpid(stopped.pid, os.WUNTRACED)
        (name,) = end_stopped_children(os.getpid(), "run")
        assert name.startswith(f"rank 7 (process {processes[0].pid} on ")
        assert processes[0].wait(10) == -signal.SIGKILL
        assert [process.poll() for process in processes[1:]] == [None, None]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_tests_of_ranks_share_one_worker(request: pytest.FixtureRequest) -> None:
    """Two workers with eight ranks each would fight for the cores; some versions of pytest lose the groups."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        assert request.node.nodeid.endswith("@ranks")
