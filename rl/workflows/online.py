"""Online workflow: external agents talk to a server of this run and rate their sessions."""

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
    """Return placeholder rows of an online run; the prompts come from the sessions."""
    return [{"prompt": str(number), "response": "."} for number in range(1024)]


class OnlineWorkflow(SamplingWorkflow):
    """Workflow that serves the policy on `host` and `port` during the run and trains rated sessions.

    An episode takes the next group: `gconfig.n_samples` rated sessions that were opened with the same `group`. With
    `n_samples` = 1 each session is a group, and the advantage must not compare answers of a group. Sessions are dropped
    and counted as `stale_session` if a token is more than `max_age` versions old, and as `incomplete_group` if their
    group is incomplete `group_timeout` seconds after its first rating. Evaluation runs `eval_agent`, or samples the
    held-out prompts and scores them with the run's reward.

    The environment variable `ARCHON_TOKEN` holds the token that opens sessions. Without it the server listens on
    loopback only.

    Args:
        gconfig: default sampling parameters of requests.
        tokenizer: renders prompts.
        reward_fn: scores held-out answers.
        host: address to listen on.
        port: port to listen on; 0: a free one.
        style: see `AgentWorkflow`.
        turn_discount: see `AgentWorkflow`.
        max_age: maximum age of a session's tokens in weight versions.
        group_timeout: seconds from a group's first rating to its last.
        eval_agent: agent for evaluation, as for `AgentWorkflow`.
        tool_call_parser: see `AgentWorkflow`.
        processor: see `AgentWorkflow`.
    """

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        reward_fn: Callable[..., Any] | str | AsyncRewardWrapper | None = None,
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
            raise ConfigError(f"max_age = {max_age} must be at least 0 versions")
        if not 0 < group_timeout <= MAX_SECONDS:
            raise ConfigError(f"group_timeout = {group_timeout} must be above 0 and at most {MAX_SECONDS:g} seconds")
        if ControlPlane.world().size > 1:
            raise ConfigError("one process serves the sessions; set actor.layout to a single process")
        self._reward_fn, self._host, self._port = reward_fn, host, port
        self._style: ExportStyle = style
        self._turn_discount, self._max_age, self._tool_call_parser = turn_discount, max_age, tool_call_parser
        self._group_timeout, self._eval_agent, self._processor = group_timeout, eval_agent, processor
        self.url: str | None = None  # set once the server listens
        self._rated: asyncio.Queue[list[Session]] = asyncio.Queue()  # complete and timed-out groups
        self._waiting: dict[str, list[Session]] = {}  # rated sessions of incomplete groups
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._starting = asyncio.Lock()
        self._server: AgentServer | None = None

    def with_gconfig(self, gconfig: GenerationHyperparameters) -> RolloutWorkflow:
        """Return the workflow for evaluation: `eval_agent`, or single-turn answers."""
        if self._eval_agent is not None:
            return AgentWorkflow(
                self._eval_agent,
                gconfig,
                self.tokenizer,
                tool_call_parser=self._tool_call_parser,
                processor=self._processor,
            )
        if self._reward_fn is None:
            raise ConfigError(
                "eval_data is set, and nothing scores its answers; set reward or workflow_args.eval_agent"
            )
        return RLVRWorkflow(self._reward_fn, gconfig, self.tokenizer)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor] | None:
        """Wait for the next group of fresh rated sessions, and return its trajectories."""
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
                session_rows_ = self._rows(session, engine)
                rows += session_rows_
                runs += [index] * len(session_rows_)
            if rows:
                tensors = trajectory_tensors([row.record for row in rows], [row.reward for row in rows], runs)
                return add_temperatures(tensors, [row.record for row in rows], self.gconfig.temperature)

    def _rows(self, session: Session, engine: InferenceEngine) -> list[Trajectory]:
        """Return the rows of a session; a session without usable rows is counted."""
        oldest = min((min(node.response.output_versions) for node in session.interactions), default=0)
        if oldest < engine.version - self._max_age:
            stale = RolloutError(
                f"a session has tokens of version {oldest}, but the weights are at {engine.version}; rate sessions "
                f"sooner, or raise max_age ({self._max_age})"
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
            f"group {group[0].group} had {len(group)} of {self.gconfig.n_samples} rated sessions "
            f"{self._group_timeout:g} s after the first; rate every session of a group, or raise group_timeout"
        )
        for _ in group:
            workflow_context.drop("incomplete_group", missing)

    def _finish(self, session: Session) -> None:
        """Add a rated session to its group, and release a complete group."""
        size = self.gconfig.n_samples
        name = session.group or session.id
        if name not in self._waiting:
            self._waiting[name] = []
            self._timers[name] = asyncio.get_running_loop().call_later(self._group_timeout, self._release_group, name)
        self._waiting[name].append(session)
        if len(self._waiting[name]) == size:
            self._release_group(name)

    def _release_group(self, name: str) -> None:
        """Queue a complete or timed-out group for the next episode."""
        self._timers.pop(name).cancel()
        self._rated.put_nowait(self._waiting.pop(name))

    async def aclose(self) -> None:
        """Stop serving; untrained sessions are lost."""
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
