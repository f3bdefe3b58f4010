"""Agents that run on nodes, which import this module."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from archon.rl.episode_context import workflow_context
from archon.schema.errors import ConfigError


async def ask(given: dict[str, Any], text: str) -> dict[str, Any]:
    """Return the model's answer to a message."""
    response = await given["http_client"].post(
        f"{given['base_url']}/chat/completions",
        json={"messages": [{"role": "user", "content": text}]},
        headers={"Authorization": f"Bearer {given['api_key']}"},
    )
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


class Told:
    """Asks once, and then sample 0 returns 1; the others do what `how` says. Leaves its process id in `folder`."""

    def __init__(self, how: str, folder: Path) -> None:
        self.how, self.folder = how, folder

    async def run(self, data: dict[str, Any], **given: Any) -> Any:
        sample = workflow_context.get().sample_index
        (self.folder / f"{sample}").write_text(str(os.getpid()))
        workflow_context.record(asked=1.0)
        await ask(given, data["prompt"])
        if self.how == "dies with all":
            while len(list(self.folder.iterdir())) < 3:  # noqa: ASYNC110 - the runs share a folder alone
                await asyncio.sleep(0.01)
            if sample:
                os.kill(os.getpid(), signal.SIGKILL)
            await asyncio.sleep(600)
        if not sample or self.how == "well":
            return 1.0
        if self.how == "hangs":
            await asyncio.sleep(600)
        if self.how == "blocks":
            time.sleep(600)  # noqa: ASYNC251 - what it must not do
        if self.how == "raises":
            raise KeyError("a defect of the agent")
        if self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "refuses":
            raise ConfigError("this agent needs a calculator")
        return {"nan": float("nan"), "none": None, "unknown": {"chatcmpl-0": 1.0}}[self.how]
