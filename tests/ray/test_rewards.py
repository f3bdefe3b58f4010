"""Rewards in processes on the nodes of a Ray cluster: as on this machine, and a lost node costs what it executes."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from archon.remote.config import WorkersConfig
from archon.rl.rewards import (
    AsyncRewardWrapper,
    RewardCrashed,
    RewardFailure,
    RewardInvalid,
    RewardRaised,
    RewardTimeout,
)
from archon.schema.errors import RewardError
from tests.remote.test_launch import is_alive, wait_for
from tests.rl.rewards import faulty
from tests.rl.rewards.test_async_wrapper import ask, outcomes

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

WORKERS = WorkersConfig(kind="ray")
SECONDS = 2.0


@pytest.fixture
def reward(ray: Any) -> Iterator[AsyncRewardWrapper]:
    with AsyncRewardWrapper(faulty.obey, timeout_seconds=SECONDS, max_workers=2, workers=WORKERS) as wrapper:
        yield wrapper


def actors() -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if "ray::RewardActor" in str(process.info)]


async def test_rewards_arrive_in_the_callers_order_from_processes_on_nodes(reward: AsyncRewardWrapper) -> None:
    assert await outcomes(reward, *map(str, range(50))) == list(range(50))
    parts = await ask(reward, "return parts")
    assert float(parts) == 1.25 and parts.parts == {"correct": 1.0, "format": 0.25}
    pid = int(await ask(reward, "pid"))
    assert any(process.pid == pid for actor in actors() for process in actor.children())
    assert await ask(reward, "torch?") == 0.0
    assert await outcomes(reward, *["count"] * 2, text="x" * 2_000_000) == [1] * 2


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("hang", RewardTimeout, "ran longer than 2 s"),
        ("hang in C", RewardTimeout, "ran longer than 2 s"),
        ("segfault", RewardCrashed, "SIGSEGV"),
        ("os._exit", RewardCrashed, "exited with code 3"),
        ("raise", RewardRaised, "no such unit: furlong"),
        ("return nan", RewardInvalid, "nan"),
        ("return None", RewardInvalid, "NoneType"),
    ],
)
async def test_a_fault_costs_its_own_sample_as_on_this_machine(
    reward: AsyncRewardWrapper, fault: str, kind: type[RewardFailure], says: str
) -> None:
    first, faulted, *others = await outcomes(reward, "1.0", fault, *["2.0"] * 10)
    assert type(faulted) is kind and says in str(faulted)
    assert [first, *others] == [1.0] + [2.0] * 10
    with AsyncRewardWrapper(faulty.obey, timeout_seconds=SECONDS, max_workers=1) as here:
        (same,) = await outcomes(here, fault)
    assert (type(same), same.kind) == (type(faulted), faulted.kind)


async def test_an_actor_that_dies_costs_the_sample_that_it_executes(reward: AsyncRewardWrapper) -> None:
    assert await outcomes(reward, *["sleep"] * 2, seconds=0.5) == [1.0] * 2
    pending = asyncio.create_task(outcomes(reward, "sleep", *["2.0"] * 10, seconds=1.9))
    await asyncio.sleep(1.3)  # enough for the ten answers on a busy machine
    before = actors()
    victims = [child.pid for actor in before for child in actor.children()]
    for actor in before:  # of the one that sleeps, and of one that has nothing more to do
        actor.kill()
    lost, *others = await pending
    assert isinstance(lost, RewardCrashed) and "was lost" in str(lost)
    assert others == [2.0] * 10
    await asyncio.to_thread(wait_for, lambda: not any(map(is_alive, victims)))
    await asyncio.to_thread(wait_for, lambda: len({actor.pid for actor in actors()} - {a.pid for a in before}) == 2)
    assert await outcomes(reward, "3.0", "4.0") == [3.0, 4.0], "none goes to one that is gone"


async def test_an_actor_that_hangs_costs_its_sample_and_is_replaced(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archon.rl.rewards.ray_pool.START_SECONDS", 1.0)
    monkeypatch.setattr("archon.rl.rewards.ray_pool._SLACK_SECONDS", 1.0)
    with AsyncRewardWrapper(faulty.obey, timeout_seconds=SECONDS, max_workers=1, workers=WORKERS) as reward:
        assert await ask(reward, "1.0") == 1.0
        (actor,) = actors()
        actor.suspend()
        started = time.monotonic()
        (lost,) = await outcomes(reward, "1.0")
        assert isinstance(lost, RewardCrashed) and "did not answer within 4 s" in str(lost)
        assert time.monotonic() - started < 10
        assert await ask(reward, "2.0") == 2.0
        await asyncio.to_thread(wait_for, lambda: not is_alive(actor.pid))


async def test_a_caller_that_is_canceled_leaves_the_others(reward: AsyncRewardWrapper) -> None:
    assert await ask(reward, "1.0") == 1.0
    canceled = asyncio.create_task(ask(reward, "sleep", seconds=1.0))
    await asyncio.sleep(0.3)
    canceled.cancel()
    assert await outcomes(reward, "1.0", "2.0") == [1.0, 2.0]


async def test_close_fails_what_is_open_and_ends_the_processes(ray: Any) -> None:
    reward = AsyncRewardWrapper(faulty.obey, timeout_seconds=60, max_workers=1, workers=WORKERS)
    pid = int(await ask(reward, "pid"))
    pending = asyncio.create_task(outcomes(reward, "hang", "1.0"))
    await asyncio.sleep(0.5)
    reward.close()
    for error in await pending:
        assert isinstance(error, RewardError) and "closed" in str(error)
    (late,) = await outcomes(reward, "1.0")
    assert isinstance(late, RewardError)
    await asyncio.to_thread(wait_for, lambda: not is_alive(pid))


async def test_a_reward_that_nodes_cannot_import_is_one_clear_error(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def reward(prompt, completions, prompt_ids, completion_ids): return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module("only_here").reward
    monkeypatch.setattr(sys, "path", sys.path[1:])
    with AsyncRewardWrapper(function, max_workers=1, workers=WORKERS) as broken:
        with pytest.raises(RewardError, match=r"cannot load the reward .*only_here.*No module") as caught:
            await broken("", "", [], [])
        assert not isinstance(caught.value, RewardFailure) and "Traceback" in caught.value.__notes__[0]


async def test_a_reward_that_is_async_stays_here(ray: Any) -> None:
    reward = AsyncRewardWrapper(faulty.obey_async, workers=WORKERS)
    assert int(await ask(reward, "pid")) == os.getpid()
