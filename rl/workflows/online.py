"""Trains on sessions of agents that run elsewhere, talk to a server of this run, and rate what they were answered."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from archon.data.images import ImageReader
from archon.generation.types import GenerationHyperparameters, InferenceEngine
from archon.parallel.control_plane import ControlPlane
from archon.remote.clients import require_package
from archon.rl.episode_context import EpisodeEngine, workflow_context
from archon.rl.rewards import AsyncRewardWrapper
from archon.rl.trajectories import add_temperatures, trajectory_tensors
from archon.rl.workflows.agent import AgentWorkflow, record_session
from archon.rl.workflows.base import RolloutWorkflow, SamplingWorkflow
from archon.rl.workflows.rlvr import RLVRWorkflow
from archon.schema.config import MAX_SECONDS
from archon.schema.errors import ConfigError, RolloutError
from archon.serve.sessions import ExportStyle, InvalidRewardError, Session, Training, Trajectory

if TYPE_CHECKING:
    from archon.serve.server import AgentServer


def session_rows(split: str) -> list[dict[str, str]]:
    """Return the rows of an online run: places for groups of sessions, whose prompts come from outside."""
    return [{"prompt": str(number), "response": "."} for number in range(1024)]


class OnlineWorkflow(SamplingWorkflow):
    """Serves the policy on `host` and `port` for as long as the run lasts, and trains the sessions that are rated.

    An episode takes the next group of `gconfig.n_samples` rated sessions: those opened with the same `group`. With
    `n_samples` = 1 each session is a group, and the advantage must be one that compares no answers of a group. A
    session with a token older than `max_age` versions of the weights is dropped and counted as `stale_session`; the
    sessions of a group that is not complete `group_timeout` seconds after its first rating, as `incomplete_group`.
    Evaluations do not use sessions: they run `eval_agent`, or ask the held-out prompts and score them with the run's
    reward.

    The token that opens sessions is read from the environment variable `ARCHON_TOKEN`; without one, the server listens
    on loopback only.

    Args:
        reward_fn: scores held-out answers.
        gconfig: default sampling values of requests.
        tokenizer: renders prompts.
        host: address to listen on.
        port: 0 takes a free one.
        style, turn_discount: see `AgentWorkflow`.
        max_age: versions by which a session's oldest token may be behind.
        group_timeout: seconds within which all sessions of a group must be rated, counted from the first.
        eval_agent: an agent for evaluations, as `AgentWorkflow` takes it.
        tool_call_parser, processor: see `AgentWorkflow`.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str | AsyncRewardWrapper,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        host: str = "127.0.0.1",
        port: int = 8000,
        style: ExportStyle = "concat",
        turn_discount: float = 1.0,
        max_age: int = 2,
        group_timeout: float = 1800.0,
        eval_agent: str | None = None,
        tool_call_parser: str | None = None,
        processor: ImageReader | None = None,
    ) -> None:
        super().__init__(gconfig, tokenizer)
        if max_age < 0:
            raise ConfigError(f"max_age = {max_age} must be a number of versions, from 0 on")
        if not 0 < group_timeout <= MAX_SECONDS:
            raise ConfigError(
                f"group_timeout = {group_timeout} must be a number of seconds above 0, {MAX_SECONDS:g} at most"
            )
        if ControlPlane.world().size > 1:
            raise ConfigError("sessions are served by one process; set a layout of one")
        self._reward_fn, self._host, self._port = reward_fn, host, port
        self._style: ExportStyle = style
        self._turn_discount, self._max_age, self._tool_call_parser = turn_discount, max_age, tool_call_parser
        self._group_timeout, self._eval_agent, self._processor = group_timeout, eval_agent, processor
        self.url: str | None = None  # once the server listens
        self._rated: asyncio.Queue[list[Session]] = asyncio.Queue()  # complete groups, and those whose time is up
        self._waiting: dict[str, list[Session]] = {}  # rated sessions of incomplete groups
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._starting = asyncio.Lock()
        self._server: AgentServer | None = None

    def with_gconfig(self, gconfig: GenerationHyperparameters) -> RolloutWorkflow:
        if self._eval_agent is not None:
            return AgentWorkflow(
                self._eval_agent,
                gconfig,
                self.tokenizer,
                tool_call_parser=self._tool_call_parser,
                processor=self._processor,
            )
        return RLVRWorkflow(self._reward_fn, gconfig, self.tokenizer)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor] | None:
        """Wait for the next group of rated sessions that are not too old, and returns its trajectories."""
        async with self._starting:
            if self._server is None:
                self._server = await self._serve(engine)
        while True:
            group = await self._rated.get()
            if len(group) < self.gconfig.n_samples:
                self._count_incomplete(group)
                continue
            rows: list[Trajectory] = []
            runs: list[int] = []
            for index, session in enumerate(group):
                found = self._rows(session, engine)
                rows += found
                runs += [index] * len(found)
            if rows:
                tensors = trajectory_tensors([row.record for row in rows], [row.reward for row in rows], runs)
                return add_temperatures(tensors, [row.record for row in rows], self.gconfig.temperature)

    def _rows(self, session: Session, engine: InferenceEngine) -> list[Trajectory]:
        """Return the rows of a session; a session without usable ones is counted."""
        oldest = min((min(node.response.output_versions) for node in session.interactions), default=0)
        if oldest < engine.version - self._max_age:
            stale = RolloutError(
                f"a session has tokens of version {oldest}, and the weights have {engine.version}; rate sessions sooner"
                f", or raise max_age, which is {self._max_age}"
            )
            workflow_context.drop("stale_session", stale)
            return []
        try:
            rows = session.export(self._style, self._turn_discount)
        except (RolloutError, InvalidRewardError) as error:
            workflow_context.drop("session", error)
            return []
        record_session(session, rows)
        return rows

    def _count_incomplete(self, group: list[Session]) -> None:
        missing = RolloutError(
            f"group {group[0].group} had {len(group)} of its {self.gconfig.n_samples} rated sessions "
            f"{self._group_timeout:g} s after the first; rate all of a group, or raise group_timeout"
        )
        for _ in group:
            workflow_context.drop("incomplete_group", missing)

    def _finish(self, session: Session) -> None:
        """Take a rated session; the last one of its group completes it."""
        size = self.gconfig.n_samples
        name = session.group or session.id
        if name not in self._waiting:
            self._waiting[name] = []
            self._timers[name] = asyncio.get_running_loop().call_later(self._group_timeout, self._release_group, name)
        self._waiting[name].append(session)
        if len(self._waiting[name]) == size:
            self._release_group(name)

    def _release_group(self, name: str) -> None:
        """Give a group, complete or not, to the next episode."""
        self._timers.pop(name).cancel()
        self._rated.put_nowait(self._waiting.pop(name))

    async def aclose(self) -> None:
        """Stop serving; sessions that are not trained yet are lost."""
        for timer in self._timers.values():
            timer.cancel()
        if self._server is not None:
            await self._server.close()

    async def _serve(self, engine: InferenceEngine) -> AgentServer:
        require_package("httpx")
        from archon.serve.server import AgentServer

        trained = engine if isinstance(engine, EpisodeEngine) else None
        policy = None if trained is None else trained.agent_sampling
        server = AgentServer(
            self.tokenizer,
            engine if trained is None else trained.generator,
            self.gconfig.model_copy(update={"n_samples": 1}),
            token=os.environ.get("ARCHON_TOKEN"),
            tool_call_parser=self._tool_call_parser,
            reader=self._processor,
            training=Training(self._finish, policy, needs_group=self.gconfig.n_samples > 1),
        )
        self.url = await server.start(self._host, self._port)
        print(f"serving {server.model} at {self.url} for training", flush=True)
        return server
