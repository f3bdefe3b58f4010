"""A process computes with as many threads as other programs leave processors for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.engine.threads import SECONDS, Load, ThreadController, process_load
from tests.engine.tiny import make_engine, sft_batch

ROOT = Path(__file__).resolve().parents[2]


class Machine:
    """Fake machine with four processors and a clock."""

    def __init__(self) -> None:
        self.now = self.process = self.background = 0.0

    def load(self) -> Load:
        return Load(4, self.process + self.background, self.process)

    def run(self, process: float, background: float, seconds: float = SECONDS) -> None:
        """So many processors are used by both for that time."""
        self.now, self.process, self.background = (
            self.now + seconds,
            self.process + process * seconds,
            self.background + background * seconds,
        )


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def threads(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadController]:
    """Of a process that may use all four."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    fitting = ThreadController(machine.load, lambda: machine.now)
    fitting.adjust()
    yield fitting
    torch.set_num_threads(before)


def crowd(machine: Machine, threads: ThreadController) -> None:
    """Background programs use three of the four processors for two checks."""
    for _ in range(2):
        machine.run(1, 3)
        threads.adjust()


@pytest.mark.parametrize(("background", "expected"), [(0, 4), (0.3, 4), (0.7, 3), (1, 3), (2.6, 1), (4, 1)])
def test_as_many_threads_as_processors_are_free(
    machine: Machine, threads: ThreadController, background: float, expected: int
) -> None:
    for _ in range(2):
        assert torch.get_num_threads() == 4
        machine.run(4 - background, background)
        threads.adjust()
    assert torch.get_num_threads() == expected


def test_all_of_them_again_once_the_others_have_ended(machine: Machine, threads: ThreadController) -> None:
    crowd(machine, threads)
    machine.run(1, 0, seconds=SECONDS / 2)
    threads.adjust()
    assert torch.get_num_threads() == 1
    machine.run(1, 0, seconds=4 * SECONDS)
    threads.adjust()
    assert torch.get_num_threads() == 4


def in_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_each_thread_that_computes_follows(machine: Machine, threads: ThreadController) -> None:
    counts = []

    def compute() -> None:
        for background in (0, 2, 2, 0):
            machine.run(1, background)
            threads.adjust()
            counts.append(torch.get_num_threads())

    in_a_thread(compute)
    assert counts == [4, 4, 2, 4]
    in_a_thread(lambda: crowd(machine, threads))
    assert torch.get_num_threads() == 4, "this one has not asked since"
    threads.adjust()
    assert torch.get_num_threads() == 1


def test_a_number_that_somebody_has_chosen_stays(
    machine: Machine, threads: ThreadController, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(3)
    crowd(machine, threads)
    threads.use_all()
    assert torch.get_num_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    other = ThreadController(machine.load, lambda: machine.now)
    for _ in range(3):
        machine.run(1, 3)
        other.adjust()
    assert torch.get_num_threads() == 3


def test_a_number_that_is_to_stay_is_all_of_them(machine: Machine, threads: ThreadController) -> None:
    crowd(machine, threads)
    in_a_thread(threads.use_all)
    threads.adjust()
    assert torch.get_num_threads() == 4
    crowd(machine, threads)
    assert torch.get_num_threads() == 4


def test_where_nothing_tells_the_load_it_stays(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    def hidden() -> Load:
        raise OSError("no /proc")

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before, fitting = torch.get_num_threads(), ThreadController(hidden, lambda: machine.now)
    crowd(machine, fitting)
    assert torch.get_num_threads() == before


def test_a_look_that_fails_changes_nothing(
    machine: Machine, threads: ThreadController, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Load:
        raise OSError("too many open files")

    crowd(machine, threads)
    machine.run(1, 0)
    with monkeypatch.context() as context:
        context.setattr(threads, "_measure_load", fail)
        threads.adjust()
        assert torch.get_num_threads() == 1
    threads.adjust()
    assert torch.get_num_threads() == 4


def test_the_machine_is_at_least_as_busy_as_this_process() -> None:
    before = process_load()
    while (now := process_load()).process < before.process + 0.5:
        torch.ones(100, 100) @ torch.ones(100, 100)
    assert now.busy - before.busy >= 0.4 and now.processors >= 1


TRAINING = """
import sys, time
from pathlib import Path
import torch
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from tests.engine.tiny import make_engine, sft_batch

torch.set_num_threads(2)  # which, before the first step, is as many as torch takes by itself
engine = make_engine(Path(sys.argv[1]), optimizer={"lr": 1e-3})
end = time.monotonic() + 60
while torch.get_num_threads() > 1 and time.monotonic() < end:
    engine.train_batch(sft_batch(), CrossEntropyLoss(), loss_token_count)
print(torch.get_num_threads())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs Linux")
def test_training_next_to_busy_programs_goes_on_with_one_thread(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    spin = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(spin) for _ in os.sched_getaffinity(0)]
    try:
        done = subprocess.run(
            [sys.executable, "-c", TRAINING, str(tmp_path)],
            env=environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert done.stdout.strip() == "1", done.stderr


def test_a_deterministic_engine_keeps_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    monkeypatch.setattr("archon.engine.build.use_all_threads", lambda: kept.append(True))
    make_engine(tmp_path / "a", optimizer={"lr": 1e-3}).train_batch(sft_batch(), CrossEntropyLoss(), loss_token_count)
    assert not kept
    make_engine(tmp_path / "b", compile=True)
    assert kept
