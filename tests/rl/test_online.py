"""Online mode end to end: `archon serve --train` in its own process, and an SDK outside that asks and rates."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIConnectionError, APIStatusError, AsyncOpenAI

from archon.training.metrics import read_jsonl
from tests.test_readme import ROOT, shown
from tests.tolerances import FIRST_RATIO_FP32

TOKEN = "a secret of the test"


async def rate_sessions(url: str, given: dict[float, str], started: list[int]) -> None:
    """Until the server is gone: two sessions of a group ask, and each is rated with a number of its own."""
    async with (
        httpx.AsyncClient(trust_env=False, timeout=30, headers={"Authorization": f"Bearer {TOKEN}"}) as owner,
        AsyncOpenAI(base_url=url, api_key="of the session", max_retries=0) as sdk,
    ):
        while True:
            started[0] += 1
            number = started[0]
            for sample in range(2):
                opened = (await owner.post(f"{url}/sessions", params={"group": str(number)})).json()
                own = sdk.with_options(api_key=opened["api_key"])
                talk: list[Any] = [{"role": "user", "content": f"{number % 10}+1="}]
                answer = await own.chat.completions.create(model="m", messages=talk)
                reward = number + sample / 2
                given[reward] = answer.choices[0].message.content or ""
                rated = await owner.post(f"{url}/sessions/{opened['id']}/reward", json={"reward": reward})
                assert rated.status_code == 200, rated.text


async def outside(url: str) -> dict[float, str]:
    given: dict[float, str] = {}
    started = [0]
    clients = [rate_sessions(url, given, started) for _ in range(4)]
    ends = await asyncio.gather(*clients, return_exceptions=True)
    gone = (httpx.TransportError, APIConnectionError, APIStatusError)
    assert all(isinstance(end, gone) for end in ends), ends
    return given


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_clients_outside_rate_their_sessions_and_a_run_trains_on_them(
    blank: Path, tmp_path: Path, staleness: int
) -> None:
    config = tmp_path / "online.yaml"
    config.write_text(shown("online-run", "yaml"))
    command = [sys.executable, "-m", "archon", "serve", str(blank), "--train", str(config), "--port", "0"]
    command += [
        *(f"run_dir={tmp_path / 'run'}", "total_steps=4", "actor.init_from_scratch=true", "algorithm.kl.coef=0"),
        *("rollout.prompts_per_step=3", "rollout.dump_groups=3", f"rollout.max_staleness={staleness}"),
        *("gconfig.n_samples=2", "gconfig.max_new_tokens=4", "rollout.workers.rewards=1", "generator.max_slots=32"),
    ]
    env = os.environ | {"ARCHON_TOKEN": TOKEN}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=env
    ) as it:
        assert it.stdout is not None
        told = ""
        for line in it.stdout:
            told += line
            if line.startswith("serving "):
                break
        else:
            raise AssertionError(told)
        given = asyncio.run(outside(line.split()[3]))
        told += it.stdout.read()
        assert it.wait(timeout=60) == 0, told
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert row["samples"] == 6 and row["groups"] == 3 and row["agent_answers"] == 1.0
        assert row["grad_norm"] > 0 and row["staleness_max"] <= 3
        assert not row.get("rollout/dropped/session")
    assert rows[0]["first_logprob_diff"] < FIRST_RATIO_FP32
    assert "logprob check" in told
    trained = read_jsonl(tmp_path / "run" / "trajectories.jsonl")
    rewards = [item["reward"] for item in trained]
    assert len(rewards) == len(set(rewards)) == 4 * 6, "every session is trained once"
    for item in trained:
        assert given[item["reward"]] == re.sub(r"<\|\w+\|>", "", item["completion"])
    assert TOKEN not in "".join(path.read_text() for path in (tmp_path / "run").glob("*.yaml"))
