"""An online run: a server that trains, and clients outside that talk to it and rate their sessions.

python -m benchmarks.learning.online rl --config benchmarks/learning/online.yaml run_dir=runs/online
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
from itertools import count
from typing import Any

import httpx

from benchmarks.harness import ROOT
from benchmarks.learning.calculator import Calculator, rows

SESSIONS, GROUPS = 8, 24
"""Sessions per group (gconfig.n_samples), and concurrent groups: more than a step takes."""


async def rate_group(url: str, client: httpx.AsyncClient, name: str, row: dict[str, Any]) -> None:
    """Run the agent in the sessions of a group, and gives each its reward."""

    async def rate_one() -> None:
        session = (await client.post(f"{url}/sessions", params={"group": name})).raise_for_status().json()
        data = {"messages": [{"role": "user", "content": row["prompt"]}], "answer": row["response"]}
        reward = await Calculator().run(data, base_url=url, api_key=session["api_key"], http_client=client)
        rated = await client.post(f"{url}/sessions/{session['id']}/reward", json={"reward": reward})
        rated.raise_for_status()

    await asyncio.gather(*(rate_one() for _ in range(SESSIONS)))


async def rate_until_it_ends(url: str) -> None:
    """Keep the server busy until it is gone."""
    tasks, numbers = rows("train"), count()
    gone = False

    async def work(client: httpx.AsyncClient) -> None:
        nonlocal gone
        while not gone:
            number = next(numbers)
            try:
                await rate_group(url, client, str(number), tasks[number % len(tasks)])
            except Exception as error:
                if not gone:
                    print(f"the server is gone: {type(error).__name__}", flush=True)
                gone = True

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(trust_env=False, timeout=None, limits=limits) as client:
        await asyncio.gather(*(work(client) for _ in range(GROUPS)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["rl"])
    parser.add_argument("--config", required=True)
    parser.add_argument("overrides", nargs="+", help="one of them is run_dir=…")
    given = parser.parse_args()
    run_dir = next(item.partition("=")[2] for item in given.overrides if item.startswith("run_dir="))
    command = [sys.executable, "-m", "archon", "serve", f"{run_dir}/start", "--train", given.config, "--port", "0"]
    with subprocess.Popen([*command, *given.overrides], stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        assert server.stdout is not None
        for line in server.stdout:
            print(line, end="", flush=True)
            if line.startswith("serving "):
                asyncio.run(rate_until_it_ends(line.split()[3]))
    sys.exit(server.returncode)


if __name__ == "__main__":
    main()
