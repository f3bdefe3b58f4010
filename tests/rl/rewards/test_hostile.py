"""A reward that changes its process, forks, floods or forges replies costs at most its own sample."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from archon.rl.rewards import AsyncRewardWrapper, RewardCrashed, RewardInvalid, RewardRaised, RewardTimeout, in_process
from archon.rl.rewards.pool import MAX_OUTPUT_BYTES
from archon.rl.rewards.result import as_reward
from archon.rl.rewards.worker import LENGTH
from tests.rl.rewards import hostile
from tests.tolerances import SOON_SECONDS


async def outcomes(*completions: str) -> list[Any]:
    """The outcome of each call, made one after another in one worker."""
    found = []
    with AsyncRewardWrapper(hostile.obey, timeout_seconds=10, max_workers=1) as reward:
        for completion in completions:
            found += await asyncio.gather(reward("prompt", completion, [], []), return_exceptions=True)
    return found


async def test_a_child_that_a_reward_forks_does_not_answer_the_next_call() -> None:
    assert await outcomes("fork and return", "2.0", "3.0") == [9.0, 2.0, 3.0]


async def test_forged_replies_cost_their_sample_and_its_worker() -> None:
    forged = ["reply with junk", "announce 4 GB", "close all descriptors"]
    found = await outcomes(*[each for fault in forged for each in (fault, "2.0")])
    assert found[1::2] == [2.0] * len(forged)
    for outcome in found[::2]:
        assert isinstance(outcome, RewardCrashed)
    assert "sent an invalid reply and was killed" in str(found[0])


async def test_a_call_begins_in_the_state_of_the_process_before_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD_OF_RUN", str(Path.cwd()))
    assert await outcomes("spoil", "rely on the process", "spoil", "2.0") == [9.0, 1.0, 9.0, 2.0]


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        ("raise 50 MB", RewardRaised, "raised ValueError: eee"),
        ("raise without a text", RewardRaised, "its text cannot be read: RuntimeError"),
        ("forget to await", RewardInvalid, "returned a coroutine; define it with `async def`"),
        ("too many parts", RewardInvalid, "returned 100,000 parts; expected at most 256"),
        ("a long name", RewardInvalid, "names must be strings of at most 200 characters"),
        ("complex", RewardInvalid, r"returned \(1\+2j\)"),
        ("text of NumPy", RewardInvalid, "an object of type str_"),
        ("beyond float32", RewardInvalid, r"returned 1e\+300; expected a finite number, of at most 3.4e\+38"),
        ("a large integer", RewardInvalid, "int too large"),
    ],
)
async def test_a_result_that_cannot_be_trained_is_named_in_a_short_message(fault: str, kind: type, said: str) -> None:
    @in_process
    def here(*arguments: Any, **data: Any) -> Any:
        return hostile.obey(*arguments, **data)

    for function in (hostile.obey, here):
        with (
            AsyncRewardWrapper(function, max_workers=1) as reward,
            pytest.raises(kind, match=said) as caught,
        ):
            await reward("prompt", fault, [], [])
        assert len(str(caught.value)) < 2500


@pytest.mark.filterwarnings("error")
def test_a_forgotten_await_prints_no_warning_of_python(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(RewardInvalid):
        as_reward(hostile.obey("", "forget to await", [], []), "obey")
    gc.collect()
    assert not recwarn.list


def test_a_worker_whose_socket_closes_with_a_reply_in_it_ends_in_silence() -> None:
    ours, theirs = socket.socketpair()
    setup = {"main": None, "function": pickle.dumps(hostile.obey), "name": "obey"}
    code = "import sys; from archon.rl.rewards.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
    command = [sys.executable, "-c", code, str(theirs.fileno()), str(os.getpid())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE) as worker:
        theirs.close()
        for body in (pickle.dumps(setup), pickle.dumps((("", "2.0", [], []), {}))):
            ours.sendall(LENGTH.pack(len(body)) + body)
        while ours.recv(4096, socket.MSG_PEEK).count(b'"event"') < 2:
            time.sleep(0.01)
        ours.close()
        errors = worker.communicate(timeout=30)[1]
    assert (worker.returncode, errors) == (0, b"")


async def test_what_a_call_prints_is_bounded(capfd: pytest.CaptureFixture[str]) -> None:
    assert await outcomes("print a lot", "2.0") == [9.0, 2.0]
    printed = capfd.readouterr().err
    assert MAX_OUTPUT_BYTES <= len(printed) < MAX_OUTPUT_BYTES + 500
    assert printed.count(f"printed more than {MAX_OUTPUT_BYTES:,} bytes in one call; the rest is dropped") == 1


async def test_children_in_sessions_of_their_own_end_with_the_worker() -> None:
    with AsyncRewardWrapper(hostile.obey, timeout_seconds=10, max_workers=1) as reward:
        assert await reward("prompt", "start children", [], []) == 9.0
        (worker,) = [
            child for child in psutil.Process().children() if "archon.rl.rewards.worker" in str(child.cmdline())
        ]
        children = [child for child in worker.children() if child.name() == "sleep"]
        assert len(children) == 50
    _wait_for_the_end(children)


def test_children_end_when_the_trainer_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import asyncio, os, signal
            from archon.rl.rewards import AsyncRewardWrapper
            from tests.rl.rewards import hostile
            reward = AsyncRewardWrapper(hostile.obey, max_workers=1)
            asyncio.run(reward("prompt", "start children", [], []))
            print("started", flush=True)
            signal.pause()
        """)
    )
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=variables) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "started\n"
        children = psutil.Process(trainer.pid).children(recursive=True)
        assert len(children) > 50
        trainer.send_signal(signal.SIGKILL)
    _wait_for_the_end(children)


def test_a_worker_is_killed_before_the_trainer_when_memory_is_short() -> None:
    with AsyncRewardWrapper(hostile.obey, max_workers=1) as reward:
        asyncio.run(reward("prompt", "1.0", [], []))
        (worker,) = [
            child for child in psutil.Process().children() if "archon.rl.rewards.worker" in str(child.cmdline())
        ]
        assert Path("/proc", str(worker.pid), "oom_score_adj").read_text() == "1000\n"


async def test_an_async_reward_that_ignores_its_cancellation_costs_its_sample() -> None:
    reward = AsyncRewardWrapper(hostile.ignore_cancellation, timeout_seconds=0.1)
    started = time.monotonic()
    with pytest.raises(RewardTimeout, match="was canceled, which it ignores: it still runs"):
        await reward("prompt", "1.6", [], [])
    assert time.monotonic() - started < 1.5
    await asyncio.sleep(0.6)  # it ends with this test


def _wait_for_the_end(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + SOON_SECONDS
    while left := [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
