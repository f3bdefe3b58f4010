"""Runs of an agent: on the trainer's event loop, or in workers on a Ray cluster."""

from __future__ import annotations

import asyncio
import json
import pickle
import traceback
from collections.abc import Sequence
from typing import Any, Protocol

from archon.remote.clients import http_client
from archon.remote.config import WorkersConfig
from archon.rl.episode_context import EpisodeContext, workflow_context
from archon.rl.ray_workers import RayWorkers, WorkerActor, WorkerLostError, WorkersBrokenError
from archon.rl.rewards.result import RewardFailure
from archon.rl.workflow_row import copy_containers
from archon.schema.errors import ConfigError, RolloutError


class Agent(Protocol):
    """An agent; `run` returns the reward of the episode, or rewards by completion id."""

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float | int | dict[str, float]:
        """Run one episode on a row."""
        ...


class AgentFailure(RolloutError):  # noqa: N818 - base class of the failures below
    """Agent run without a reward: the sample is dropped and counted under `kind`, never scored 0."""

    kind: str = "agent_failed"


class AgentTimeout(AgentFailure, TimeoutError):  # noqa: N818 - as its base
    """The run exceeded its time limit and was canceled."""

    kind = "agent_timeout"


class AgentLost(AgentFailure):
    """The agent's worker or its node died or cannot be reached."""

    kind = "agent_lost"


class AgentRaised(AgentFailure):
    """The agent raised in a worker; a note holds the traceback.

    `kind` is `agent_raised`, or the kind of the reward failure that the agent met.
    """

    kind = "agent_raised"

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class LocalRuns:
    """Agent runs on the caller's event loop."""

    host = "127.0.0.1"

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def run(self, data: dict[str, Any], base_url: str, api_key: str, seconds: float) -> Any:
        """Return the result of the agent's `run`; raise AgentTimeout or the agent's exception."""
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await run_agent(self._agent, data, base_url, api_key)
        except Exception as error:
            if limit.expired():
                raise AgentTimeout(f"the agent ran longer than {seconds:g} s and was canceled") from error
            raise

    async def close(self) -> None:
        """Do nothing."""


class AgentActor(WorkerActor):
    """Ray actor that runs an agent."""

    def __init__(self, path: Sequence[str], agent: bytes) -> None:
        super().__init__(path)
        self._agent: Agent = pickle.loads(agent)  # noqa: S301 - written by the trainer, as below

    async def run(self, call: bytes) -> bytes:
        """Return the result or the exception of the agent's `run` as JSON."""
        data, base_url, api_key, episode = pickle.loads(call)  # noqa: S301
        context = EpisodeContext(**episode)
        workflow_context.enter(context)
        try:
            reply: dict[str, Any] = {"reward": await run_agent(self._agent, data, base_url, api_key)}
        except Exception as error:  # noqa: BLE001 - reported to the trainer
            kind = f"reward_{error.kind}" if isinstance(error, RewardFailure) else AgentRaised.kind
            reply = {"kind": kind, "text": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-8000:]}
            reply["fatal"] = isinstance(error, ConfigError)
        drops = {kind: (number, str(context.first_errors[kind])) for kind, number in context.drops.items()}
        return json.dumps(reply | {"numbers": context.numbers, "drops": drops}, default=float).encode()


class RayRuns:
    """Agent runs in Ray workers. A run waits for a free worker; its time limit starts then."""

    def __init__(self, agent: Agent, config: WorkersConfig) -> None:
        try:
            pickled = pickle.dumps(agent, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001 - pickle raises many types
            raise ConfigError(f"workflow: the agent cannot be pickled for a worker: {error}") from None
        if b"__main__" in pickled:
            raise ConfigError("workflow: workers cannot import the running script; move the agent to a module")
        name = type(agent).__qualname__
        self._workers = RayWorkers(AgentActor, (pickled,), config, config.agents, config.runs, f"agent {name}")
        self.host = self._workers.address

    async def run(self, data: dict[str, Any], base_url: str, api_key: str, seconds: float) -> Any:
        """Return the result of the agent's `run`; raise AgentFailure, or ConfigError from the agent."""
        context = workflow_context.get()
        episode = {name: getattr(context, name) for name in ("task_id", "is_eval", "seed", "sample_index")}
        try:
            answer = await self._workers.run(pickle.dumps((dict(data.items()), base_url, api_key, episode)), seconds)
        except TimeoutError:
            raise AgentTimeout(f"the agent ran longer than {seconds:g} s and was canceled") from None
        except WorkerLostError as error:
            raise AgentLost(str(error)) from None
        except WorkersBrokenError as error:
            raise ConfigError(str(error)) from None
        reply = json.loads(answer)
        for name, values in reply["numbers"].items():
            for value in values:
                workflow_context.record(**{name: value})
        for kind, (number, text) in reply["drops"].items():
            for _ in range(number):
                workflow_context.drop(kind, AgentRaised(text, kind))
        if "reward" in reply:
            return reply["reward"]
        if reply["fatal"]:
            raise ConfigError(reply["text"].partition(": ")[2])
        failure = AgentRaised(f"the agent raised {reply['text']}", reply["kind"])
        failure.add_note(reply["trace"])
        raise failure

    async def close(self) -> None:
        """End the workers."""
        await asyncio.to_thread(self._workers.close)


async def run_agent(agent: Agent, data: dict[str, Any], base_url: str, api_key: str) -> Any:
    """Run the agent on a copy of the row `data`."""
    # The cost of a connection pool grows with the square of its connections: one pool per run.
    async with http_client() as client:
        copied = copy_containers(dict(data.items()))
        return await agent.run(copied, base_url=base_url, api_key=api_key, http_client=client)


def make_runs(agent: Agent, config: WorkersConfig | None) -> LocalRuns | RayRuns:
    """Return the runner for the configured location."""
    return RayRuns(agent, config) if config is not None and config.kind == "ray" else LocalRuns(agent)
