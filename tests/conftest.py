"""What holds for every test: one thread each, fixed seeds, no network, and no silent skip."""

from __future__ import annotations

import gc
import json
import os
import random
from collections.abc import Generator
from pathlib import Path

# Before torch is imported. Two workers share two cores, and one thread gives the same sums everywhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch

if torch.version.cuda is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from archon.engine import forkserver
from tests.sampling import SAMPLE, SAMPLE_FUNCTIONS, current_commit, deselected

# Once per worker, for all the processes that its tests start.
forkserver.PRELOADED_MODULES += [
    "archon.tools.check.contracts",
    "archon.cli.app",
    "archon.cli.check_model",
    "archon.rl.trainer",
    "transformers.generation",
    "transformers.models.auto.modeling_auto",
]
NEEDS_GPU = "gpu: no CUDA device, or one where the test needs two"
NEEDS_DATA = "data: no folder ../shared/data, and ARCHON_DATA is not set"
NEEDS_REAL = "real: the packages of the extra `real` are not installed"


def find_data() -> Path | None:
    """The folder of real data: `ARCHON_DATA`, or `shared/data` next to the checkout."""
    named = os.environ.get("ARCHON_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    if named and not folder.is_dir():
        raise pytest.UsageError(f"ARCHON_DATA={named} is not a folder")
    return folder if folder.is_dir() else None


if (_data := find_data()) is not None:
    os.environ["ARCHON_DATA"] = str(_data)  # also for the processes that tests start


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real data; a test that asks for it bears the mark `data`."""
    folder = find_data()
    if folder is None:
        raise pytest.UsageError("a test without the mark `data` asked for data_dir")
    return folder


class Kills:
    """How often a kill test kills at random moments, and the record of each kill.

    `wanted` is 5, or what ARCHON_KILLS says (`make test-kill`: 30). A test adds each kill and what it left behind; with
    ARCHON_KILL_RECORD the entries are appended to that file as JSON lines.
    """

    def __init__(self, test: str) -> None:
        self.test = test
        self.wanted = int(os.environ.get("ARCHON_KILLS", "5"))
        self.done = 0

    def add(self, moment: str, **outcome: object) -> None:
        """`moment` is the named point, or the seconds after which the process was killed."""
        self.done += 1
        if record := os.environ.get("ARCHON_KILL_RECORD"):
            with open(record, "a", encoding="utf-8") as file:
                file.write(json.dumps({"test": self.test, "moment": moment, **outcome}) + "\n")


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> Kills:
    """For tests that kill a process; `-k kill` selects them by their names."""
    return Kills(request.node.name)


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection(session: pytest.Session) -> None:
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Excludes what was collected from garbage collection: thousands of tests, which each run of RL would visit."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if max(SAMPLE, SAMPLE_FUNCTIONS) > 1:
        sampled = (item.nodeid for item in items if not item.get_closest_marker("unsampled"))
        out = deselected(sampled, SAMPLE, current_commit(), SAMPLE_FUNCTIONS)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
        items[:] = [item for item in items if item.nodeid not in out]
    has_gpu, has_data = torch.cuda.is_available(), find_data() is not None
    for item in items:
        lacks_gpus = item.get_closest_marker("multi_gpu") and torch.cuda.device_count() < 2
        if lacks_gpus or (item.get_closest_marker("gpu") and not has_gpu):
            item.add_marker(pytest.mark.skip(reason=NEEDS_GPU))
        if item.get_closest_marker("data") and not has_data:
            item.add_marker(pytest.mark.skip(reason=NEEDS_DATA))
        if item.get_closest_marker("real"):
            from tests.real_model import SMOLLM2

            if not SMOLLM2.available:
                item.add_marker(pytest.mark.skip(reason=NEEDS_REAL))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape halves of surrogate pairs in a test's output: a worker could not send them."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


class SkipGuard:
    """Fails the run when anything was skipped for another reason than a missing GPU or, outside CI, missing data or
    packages."""

    def __init__(self) -> None:
        self.allowed = {NEEDS_GPU} if os.environ.get("CI") else {NEEDS_GPU, NEEDS_DATA, NEEDS_REAL}
        self.forbidden: list[str] = []

    def _judge(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if reason.removeprefix("Skipped: ") not in self.allowed:
            self.forbidden.append(f"{report.nodeid}: {reason}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._judge(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._judge(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.forbidden and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.forbidden:
            terminalreporter.section("skipped, which only `gpu`, `data` and `real` tests may be", red=True)
            for line in self.forbidden:
                terminalreporter.line(line)


def pytest_sessionstart(session: pytest.Session) -> None:
    # Under xdist the reports of every worker reach the controller, which alone decides the exit status.
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(SkipGuard(), "skip-guard")
