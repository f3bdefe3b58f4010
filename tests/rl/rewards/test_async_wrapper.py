"""AsyncRewardWrapper: a reward that misbehaves costs its own sample, is counted, and never becomes a silent 0."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from archon.rl.rewards import (
    AsyncRewardWrapper,
    Reward,
    RewardCrashed,
    RewardFailure,
    RewardInvalid,
    RewardRaised,
    RewardTimeout,
    in_process,
)
from archon.rl.rewards.result import FAILURE_KINDS
from archon.schema.errors import RewardError
from tests.rl.rewards import faulty
from tests.tolerances import REWARD_BATCH_SECONDS, REWARD_TIMEOUT_SECONDS, SOON_SECONDS


@pytest.fixture
def reward() -> Iterator[AsyncRewardWrapper]:
    with AsyncRewardWrapper(faulty.obey, timeout_seconds=REWARD_TIMEOUT_SECONDS, max_workers=2) as wrapper:
        yield wrapper


async def ask(reward: AsyncRewardWrapper, completion: str, **data: Any) -> Reward:
    return await reward("prompt", completion, [1, 2], [3], **data)


async def outcomes(reward: AsyncRewardWrapper, *completions: str, **data: Any) -> list[Any]:
    return await asyncio.gather(*(ask(reward, each, **data) for each in completions), return_exceptions=True)


@in_process
def immediate(prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> Any:
    if completions == "leave":
        raise SystemExit(3)
    completion_ids.append(9)
    return int(completions) / os.getpid()


def around(*arguments: Any, **data: Any) -> Any:
    return immediate(*arguments, **data)


functools.update_wrapper(around, immediate, ("__doc__",))


async def test_a_reward_marked_so_is_called_in_this_process_and_fails_as_others_do() -> None:
    before = psutil.Process().children()
    with AsyncRewardWrapper(immediate) as reward:
        assert reward.in_process
        found = await outcomes(reward, "3", "three", "leave")
        assert found[0] == 3 / os.getpid()
        assert isinstance(found[2], RewardRaised)
        ids = [3]
        await reward("prompt", "1", [1], ids)
        assert ids == [3], "tokens that are trained on"
        assert isinstance(found[1], RewardRaised) and "immediate raised ValueError" in str(found[1])
        assert isinstance(found[1].__cause__, ValueError)
        assert psutil.Process().children() == before
    with AsyncRewardWrapper("exact_match") as named:
        assert named.in_process and await ask(named, " 7 ", answer=7) == 1.0
    for other in ("gsm8k", around, functools.partial(immediate, extra=1)):
        with AsyncRewardWrapper(other) as wrapper:
            assert not wrapper.in_process


# -- what it does when all is well ----------------------------------------------------------------------------------


async def test_a_reward_arrives_with_its_parts(reward: AsyncRewardWrapper) -> None:
    assert await ask(reward, "0.5") == 0.5
    total = await ask(reward, "return parts")
    assert total == 1.25
    assert total.parts == {"correct": 1.0, "format": 0.25}


async def test_rewards_arrive_in_the_callers_order(reward: AsyncRewardWrapper) -> None:
    assert await outcomes(reward, *map(str, range(500))) == list(range(500))


async def test_a_rows_columns_reach_the_reward_but_for_the_names_of_its_arguments(reward: AsyncRewardWrapper) -> None:
    row = {"prompt": "collides", "completion_ids": 0, "answer": "3", "level": 4}
    assert await ask(reward, "count", **row) == 2


async def test_callable_objects_and_partials_are_rewards() -> None:
    with AsyncRewardWrapper(faulty.Judge(bonus=10.0), max_workers=1) as judge:
        assert await ask(judge, "four") == 14.0
    with AsyncRewardWrapper(functools.partial(faulty.obey, seconds=0.0), max_workers=1) as partial:
        assert await ask(partial, "sleep") == 1.0


async def test_workers_never_import_torch(reward: AsyncRewardWrapper) -> None:
    assert await ask(reward, "torch?") == 0.0


async def test_an_argument_larger_than_a_pipe_arrives(reward: AsyncRewardWrapper) -> None:
    assert await outcomes(reward, *["count"] * 6, text="x" * 2_000_000, ids=list(range(100_000))) == [2] * 6


def test_it_works_in_a_thread_and_in_one_loop_after_another(reward: AsyncRewardWrapper) -> None:
    answers: list[Any] = []

    def work() -> None:
        answers.extend(asyncio.run(outcomes(reward, *["0.5"] * 20)))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work()
    assert answers == [0.5] * 80


# -- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["hang", "hang in C"])
async def test_a_reward_that_hangs_is_killed_and_costs_one_sample(reward: AsyncRewardWrapper, fault: str) -> None:
    started = time.monotonic()
    first, hung, *others = await outcomes(reward, "1.0", fault, *["2.0"] * 20)
    assert isinstance(hung, RewardTimeout)
    assert "ran longer than" in str(hung)
    assert [first, *others] == [1.0] + [2.0] * 20
    assert time.monotonic() - started < REWARD_TIMEOUT_SECONDS + SOON_SECONDS
    assert hung.kind == "timeout"


@pytest.mark.parametrize(("fault", "how"), [("os._exit", "exited with code 3"), ("segfault", "killed by SIGSEGV")])
async def test_a_reward_whose_process_dies_costs_one_sample(reward: AsyncRewardWrapper, fault: str, how: str) -> None:
    first, died, *others = await outcomes(reward, "1.0", fault, *["2.0"] * 20)
    assert isinstance(died, RewardCrashed)
    assert how in str(died)
    assert [first, *others] == [1.0] + [2.0] * 20
    assert died.kind == "crashed"


@pytest.mark.parametrize(("fault", "what"), [("raise", "KeyError: 'no such unit"), ("sys.exit", "SystemExit: 1")])
async def test_a_reward_that_raises_costs_one_sample_and_shows_its_traceback(
    reward: AsyncRewardWrapper, fault: str, what: str
) -> None:
    first, raised, *others = await outcomes(reward, "1.0", fault, *["2.0"] * 20)
    assert isinstance(raised, RewardRaised)
    assert f"tests.rl.rewards.faulty.obey raised {what}" in str(raised)
    assert "faulty.py" in raised.traceback_text and what in raised.traceback_text
    assert raised.__notes__ == [raised.traceback_text]
    assert [first, *others] == [1.0] + [2.0] * 20
    assert raised.kind == "raised"


@pytest.mark.parametrize("fault", ["return a lock", "return a lambda", "return nan", "return inf", "return text"])
async def test_an_unpicklable_or_not_finite_result_costs_one_sample(reward: AsyncRewardWrapper, fault: str) -> None:
    first, invalid, *others = await outcomes(reward, "1.0", fault, *["2.0"] * 20)
    assert isinstance(invalid, RewardInvalid)
    assert "tests.rl.rewards.faulty.obey" in str(invalid)
    assert [first, *others] == [1.0] + [2.0] * 20
    assert invalid.kind == "invalid"


async def test_no_fault_becomes_a_silent_zero(reward: AsyncRewardWrapper) -> None:
    faults = [
        name for name in faulty.FAULTS if name not in ("return parts", "count", "torch?", "start a child and hang")
    ]
    for outcome in await outcomes(reward, *faults):
        assert isinstance(outcome, RewardFailure)
        assert outcome.kind in FAILURE_KINDS


async def test_the_timeout_starts_when_execution_starts_and_not_in_the_queue() -> None:
    seconds, count = 0.4 * REWARD_TIMEOUT_SECONDS, 5
    with AsyncRewardWrapper(faulty.obey, timeout_seconds=REWARD_TIMEOUT_SECONDS, max_workers=1) as reward:
        started = time.monotonic()
        assert await outcomes(reward, *["sleep"] * count, seconds=seconds) == [1.0] * count
        assert time.monotonic() - started > REWARD_TIMEOUT_SECONDS


async def test_the_timeout_of_calls_sent_ahead_starts_when_they_start() -> None:
    """Cheap calls are sent to a worker many at a time; the slow ones among them still have a clock of their own."""
    seconds = 0.4 * REWARD_TIMEOUT_SECONDS
    with AsyncRewardWrapper(faulty.obey, timeout_seconds=REWARD_TIMEOUT_SECONDS, max_workers=1) as reward:
        await outcomes(reward, *["1.0"] * 200)
        slow = await outcomes(reward, *["sleep"] * 5, seconds=seconds)
        assert slow == [1.0] * 5
        await outcomes(reward, *["1.0"] * 200)
        *good, hung, good_too = await outcomes(reward, *["1.0"] * 10, "hang", "1.0")
        assert isinstance(hung, RewardTimeout)
        assert [*good, good_too] == [1.0] * 11


async def test_only_the_guilty_worker_is_replaced() -> None:
    with AsyncRewardWrapper(faulty.obey, timeout_seconds=REWARD_TIMEOUT_SECONDS, max_workers=3) as reward:
        await outcomes(reward, *["sleep"] * 3, seconds=0.3)  # all three run
        before = {child.pid for child in _workers(reward)}
        assert len(before) == 3
        died, *others = await outcomes(reward, "os._exit", *["sleep"] * 4, seconds=0.3)
        assert isinstance(died, RewardCrashed)
        assert others == [1.0] * 4
        after = {child.pid for child in _workers(reward)}
        assert len(before & after) == 2


async def test_calls_behind_a_guilty_one_run_exactly_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with AsyncRewardWrapper(faulty.obey, timeout_seconds=REWARD_TIMEOUT_SECONDS, max_workers=2) as reward:
        await outcomes(reward, *["1.0"] * 200)  # cheap: from now on calls are sent ahead
        calls = [
            reward(str(number), fault or "log", [], [], log=str(log))
            for number, fault in enumerate(["hang", *[None] * 30, "os._exit", *[None] * 30, "segfault", *[None] * 30])
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
    failures = {number: type(result) for number, result in enumerate(results) if isinstance(result, Exception)}
    assert failures == {0: RewardTimeout, 31: RewardCrashed, 62: RewardCrashed}
    assert sorted(map(int, log.read_text().split())) == [number for number in range(93) if number not in failures]


async def test_a_killed_reward_takes_its_own_children_along(reward: AsyncRewardWrapper, tmp_path: Path) -> None:
    log = tmp_path / "pid"
    (outcome,) = await outcomes(reward, "start a child and hang", log=str(log))
    assert isinstance(outcome, RewardTimeout)
    assert _ends_soon(int(log.read_text()))


async def test_a_cancellation_after_the_time_limit_ends_the_call() -> None:
    calls = []

    async def slow_to_end(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
        calls.append(prompt)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.2)
            raise
        return 1.0

    reward = AsyncRewardWrapper(slow_to_end, timeout_seconds=0.1, max_retries=2)
    task = asyncio.create_task(reward("", "", [], []))
    await asyncio.sleep(0.2)  # the time limit is over, and the reward is still ending
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(calls) == 1


async def test_a_cancelled_call_does_not_run(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with AsyncRewardWrapper(faulty.obey, timeout_seconds=REWARD_TIMEOUT_SECONDS, max_workers=1) as reward:
        running = asyncio.create_task(ask(reward, "sleep", seconds=0.3))
        queued = asyncio.create_task(ask(reward, "log", log=str(log)))
        await asyncio.sleep(0.1)
        queued.cancel()
        assert await running == 1.0
        assert await ask(reward, "2.0") == 2.0
    assert not log.exists()


# -- construction ---------------------------------------------------------------------------------------------------


def test_an_unpicklable_function_is_refused_at_construction() -> None:
    def local(prompt: Any, completions: Any, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
        return 1.0

    for function in (local, lambda *arguments, **data: 1.0):
        with pytest.raises(RewardError, match=r"cannot be sent to a worker process.*top level of a module"):
            AsyncRewardWrapper(function)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward_fn": 3}, "must be a function or a name, got 3"),
        ({"reward_fn": "gsm9k"}, "unknown reward 'gsm9k'"),
        ({"reward_fn": faulty.obey, "timeout_seconds": 0}, "timeout_seconds must be positive, got 0"),
        ({"reward_fn": faulty.obey, "max_workers": 0}, "max_workers must be at least 1, got 0"),
    ],
)
def test_a_wrong_wrapper_is_refused_at_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        AsyncRewardWrapper(**arguments)


async def test_a_reward_that_no_worker_can_load_fails_every_call_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BROKEN_FOR", str(os.getpid()))
    with AsyncRewardWrapper("tests.rl.rewards.broken_module.reward", max_workers=1) as reward:
        for _ in range(2):
            with pytest.raises(RewardError, match=r"cannot load the reward function.*no license file") as caught:
                await ask(reward, "1.0")
            assert not isinstance(caught.value, RewardFailure)  # no sample will do better: the run should stop
            assert "Traceback" in caught.value.__notes__[0]


async def test_an_argument_that_cannot_be_sent_is_named(reward: AsyncRewardWrapper) -> None:
    with pytest.raises(RewardError, match=r"an argument of reward .* cannot be sent"):
        await ask(reward, "1.0", lock=threading.Lock())


# -- async def rewards ----------------------------------------------------------------------------------------------


async def test_async_rewards_run_in_the_loop_with_a_timeout() -> None:
    reward = AsyncRewardWrapper(faulty.obey_async, timeout_seconds=0.2)
    assert await ask(reward, "pid") == os.getpid()
    completions = ["1.0", "hang", "raise", "return nan", "time out by itself", "return parts"]
    good, hung, raised, invalid, own_timeout, parts = await outcomes(reward, *completions)
    assert (good, parts) == (1.0, 1.25)
    assert isinstance(hung, RewardTimeout)
    assert isinstance(raised, RewardRaised) and "furlong" in raised.traceback_text
    assert isinstance(invalid, RewardInvalid)
    assert isinstance(own_timeout, RewardRaised)
    assert [each.kind for each in (hung, raised, invalid, own_timeout)] == ["timeout", "raised", "invalid", "raised"]


async def test_an_async_reward_that_exits_costs_one_sample() -> None:
    reward = AsyncRewardWrapper(faulty.obey_async)
    good, left, closed = await outcomes(reward, "1.0", "sys.exit", "generator exit")
    assert good == 1.0
    assert isinstance(left, RewardRaised) and "raised SystemExit: 1" in str(left)
    assert isinstance(closed, RewardRaised) and "raised GeneratorExit" in str(closed)


async def test_a_timeout_of_years_is_waited_for() -> None:
    with AsyncRewardWrapper(faulty.obey, timeout_seconds=1e9, max_workers=1) as reward:
        assert await outcomes(reward, "1.0", "2.0") == [1.0, 2.0]


# -- the end --------------------------------------------------------------------------------------------------------


async def test_close_fails_what_is_open_and_later_calls_at_once(reward: AsyncRewardWrapper) -> None:
    open_calls = [asyncio.create_task(ask(reward, "hang")) for _ in range(6)]
    await asyncio.sleep(0.2)
    started = time.monotonic()
    reward.close()
    reward.close()
    for outcome in await asyncio.gather(*open_calls, return_exceptions=True):
        assert isinstance(outcome, RewardError) and "is closed" in str(outcome)
    with pytest.raises(RewardError, match="is closed"):
        await ask(reward, "1.0")
    assert time.monotonic() - started < SOON_SECONDS


def test_no_process_thread_or_file_is_left_after_close() -> None:
    me = psutil.Process()
    with AsyncRewardWrapper(faulty.obey, max_workers=1) as warm:
        asyncio.run(outcomes(warm, "1.0"))
    files, threads = me.num_fds(), threading.active_count()
    for _ in range(5):
        with AsyncRewardWrapper(faulty.obey, timeout_seconds=0.2, max_workers=2) as reward:
            asyncio.run(outcomes(reward, "1.0", "hang", "os._exit", *["2.0"] * 20))
            workers = _workers(reward)
            assert workers
        assert not any(child.is_running() for child in workers)
    assert (me.num_fds(), threading.active_count()) == (files, threads)


def test_a_wrapper_that_is_dropped_takes_its_processes_along() -> None:
    reward = AsyncRewardWrapper(faulty.obey, max_workers=1)
    asyncio.run(outcomes(reward, "1.0"))
    (worker,) = _workers(reward)
    del reward
    assert _ends_soon(worker.pid)


EXIT_SCRIPT = """
    import asyncio, os, signal, sys, threading, time
    from archon.rl.rewards import AsyncRewardWrapper

    def hang(prompt, completions, prompt_ids, completion_ids, **data):
        print(os.getpid(), file=sys.stderr, flush=True)
        time.sleep(3600)

    async def main():
        asyncio.create_task(reward("", "", [], []))
        await asyncio.sleep(1.5)

    if __name__ == "__main__":
        reward = AsyncRewardWrapper(hang, timeout_seconds=3600, max_workers=1)
        {run}
"""


@pytest.mark.parametrize(
    ("run", "code"),
    [
        ("asyncio.run(main())", 0),
        ("asyncio.run(main()); raise SystemExit(5)", 5),
        ("thread = threading.Thread(target=lambda: asyncio.run(main())); thread.start(); thread.join()", 0),
        ("asyncio.run(main()); os._exit(6)", 6),
        ("asyncio.run(main()); os.kill(os.getpid(), signal.SIGKILL)", -9),
    ],
    ids=["return", "SystemExit", "thread", "os._exit", "SIGKILL"],
)
def test_interpreter_exit_never_waits_for_a_reward_and_leaves_no_process(tmp_path: Path, run: str, code: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(EXIT_SCRIPT).format(run=run))
    started = time.monotonic()
    ended = subprocess.run([sys.executable, script], stderr=subprocess.PIPE, text=True, timeout=60, env=_with_path())
    assert ended.returncode == code, ended.stderr
    assert time.monotonic() - started < 1.5 + SOON_SECONDS
    assert _ends_soon(int(ended.stderr.split()[0]))


def test_a_script_without_main_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import asyncio
            from archon.rl.rewards import AsyncRewardWrapper

            def one(prompt, completions, prompt_ids, completion_ids, **data):
                return 1.0

            async def main():
                print(await AsyncRewardWrapper(one)("", "", [], []))

            asyncio.run(main())
        """)
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, env=_with_path())
    assert ended.returncode == 1
    assert "if __name__ == '__main__':" in ended.stderr.strip().splitlines()[-1] + ended.stderr


def test_a_function_of_an_interactive_session_is_refused() -> None:
    script = (
        "from archon.rl.rewards import AsyncRewardWrapper\n"
        "def one(prompt, completions, prompt_ids, completion_ids, **data): return 1.0\n"
        "AsyncRewardWrapper(one)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=_with_path())
    assert "interactive session" in ended.stderr


def test_a_batch_of_256_cheap_rewards_takes_a_tenth_of_a_second(reward: AsyncRewardWrapper) -> None:
    async def best_of(rounds: int) -> float:
        await outcomes(reward, *["sleep"] * 4, seconds=0.2)  # both workers run
        seconds = []
        for _ in range(rounds):
            started = time.perf_counter()
            await outcomes(reward, *["1.0"] * 256, text="x" * 1000, ids=list(range(300)))
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    assert asyncio.run(best_of(20)) < REWARD_BATCH_SECONDS


def _workers(reward: AsyncRewardWrapper) -> list[psutil.Process]:
    named = f"rewards of {reward.name}"
    assert any(thread.name == named for thread in threading.enumerate())
    own = {worker.process.pid for worker in reward._pool._workers}
    return [child for child in psutil.Process().children() if child.pid in own]


def _ends_soon(pid: int) -> bool:
    deadline = time.monotonic() + SOON_SECONDS
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


def _with_path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}


def test_a_call_that_fails_is_made_again_as_often_as_asked(tmp_path: Path) -> None:
    with AsyncRewardWrapper(faulty.fail_until, max_workers=1, max_retries=2) as reward:
        log = tmp_path / "third"
        assert asyncio.run(reward("p", "c", [], [], log=str(log), right=3)) == 1.0
        log = tmp_path / "fourth"
        with pytest.raises(RewardRaised, match="not yet"):
            asyncio.run(reward("p", "c", [], [], log=str(log), right=4))
        assert len(log.read_text().splitlines()) == 3
    with pytest.raises(RewardError, match="max_retries must be at least 0, got -1"):
        AsyncRewardWrapper(faulty.fail_until, max_retries=-1)
