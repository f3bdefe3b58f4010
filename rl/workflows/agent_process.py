"""An agent that is a command in its own process, in any language."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from typing import Any

from archon.schema.errors import RolloutError


class ProcessAgent:
    """Runs a command for each episode, with `OPENAI_BASE_URL` and `OPENAI_API_KEY` set in its environment only.

    The command reads the row as JSON from standard input, and the last line that it prints is the reward: a JSON
    number, or an object of rewards by completion id. A command that fails costs its sample, and the error ends with its
    standard error. It is killed when its time is up.

    Args:
        command: the program and its arguments.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, **extra_kwargs: Any) -> Any:
        """Returns the reward that the command printed; raises `RolloutError` where it failed or printed none."""
        process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key},
        )
        try:
            out, err = await process.communicate(json.dumps(data).encode())
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        errors = err.decode(errors="replace").strip()[-2000:]
        if process.returncode:
            raise RolloutError(f"the agent {self.command[0]} ended with code {process.returncode}: {errors}")
        last = out.decode(errors="replace").strip().rpartition("\n")[2]
        try:
            return json.loads(last)
        except ValueError:
            raise RolloutError(f"the last line of the agent {self.command[0]} is no JSON: {last[:200]!r}") from None
