"""Workflow for agents: user programs that call the model over HTTP and return a reward."""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from archon.data.images import ImageReader
from archon.generation.record import UnusableAnswerError
from archon.generation.seeds import derive_seed
from archon.generation.types import GenerationHyperparameters, InferenceEngine
from archon.remote.clients import require_package
from archon.remote.config import WorkersConfig
from archon.rl.agent_sampling import SamplingPolicy
from archon.rl.episode_context import EpisodeEngine, workflow_context
from archon.rl.logprob_check import truncating_fields
from archon.rl.rewards.result import RewardFailure, RewardInvalid
from archon.rl.trajectories import add_temperatures, trajectory_tensors
from archon.rl.workflows.agent_runs import Agent, AgentFailure, make_runs
from archon.rl.workflows.base import SamplingWorkflow
from archon.schema.children import child_environment, kill_group_after
from archon.schema.errors import ConfigError, RolloutError
from archon.schema.lazy import import_dotted
from archon.serve.sessions import ExportStyle, InvalidRewardError, Session, Trajectory
from archon.serve.tool_calls import tool_format

if TYPE_CHECKING:
    from archon.serve.server import AgentServer


class ProcessAgent:
    """Agent that runs a command per episode, with `OPENAI_BASE_URL` and `OPENAI_API_KEY` in its environment.

    The command reads the row as JSON from standard input. Its last printed line is the reward: a JSON number, or an
    object of rewards by completion id. A failing command costs its sample, and is killed at the time limit. Its
    child processes end with it.

    Args:
        command: the program and its arguments.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, **extra_kwargs: Any) -> Any:
        """Return the printed reward; raise `RolloutError` if the command fails or prints none."""
        group = secrets.token_hex(16)
        process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # a kill includes the command's children
            env={**child_environment(group), "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key},
        )
        kill_group_after(process.pid, group)
        try:
            out, err = await process.communicate(json.dumps(data).encode())
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):  # it has just ended
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        errors = err.decode(errors="replace").strip()[-2000:]
        if process.returncode:
            raise RolloutError(f"the agent {self.command[0]} exited with code {process.returncode}: {errors}")
        last = out.decode(errors="replace").strip().rpartition("\n")[2]
        try:
            return json.loads(last)
        except ValueError:
            raise RolloutError(
                f"the agent {self.command[0]} must print its reward as JSON in the last line, got {last[:200]!r}"
            ) from None


class AgentWorkflow(SamplingWorkflow):
    """Workflow that runs an agent `gconfig.n_samples` times per row, each run in its own session.

    The agent's `run` gets the row, `base_url` and `api_key` of a local OpenAI-compatible server (Anthropic clients need
    the URL without /v1), and `http_client`, an `httpx.AsyncClient` for `AsyncOpenAI`. It runs on the trainer's event
    loop: a blocking call stops generation, so use asynchronous clients or `ProcessAgent`. With `workers` on other nodes
    the agent runs there. `gconfig` fills in unset sampling parameters of a request; `rollout.agent_sampling` rules over
    the others in training.

    The agent returns a number, the reward of every branch, or a dictionary of rewards by completion id. A run that
    raises, times out, loses its worker or returns no finite number costs its sample and is counted by kind. Answers
    that the agent cancels during sampling are counted and not trained.

    Args:
        agent: an object, a class without constructor arguments, or the dotted path of either.
        gconfig: sampling parameters; `n_samples` is the number of runs per row.
        tokenizer: renders prompts; its end-of-text and padding ids stop an answer.
        style: `concat` trains a conversation as one row, `individual` each answer as its own row.
        turn_discount: reward factor for each later answer, in (0, 1]; see `Session.export`.
        timeout_seconds: time limit of one run.
        tool_call_parser: tool-call format of the model, such as `hermes`; None: the chat template's format.
        processor: reads images in requests; None for a text model.
        workers: location of the agents; None: this process.
    """

    def __init__(
        self,
        agent: Agent | type[Agent] | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        style: ExportStyle = "concat",
        turn_discount: float = 1.0,
        timeout_seconds: float = 600.0,
        tool_call_parser: str | None = None,
        processor: ImageReader | None = None,
        workers: WorkersConfig | None = None,
    ) -> None:
        if style not in ("individual", "concat") or not 0 < turn_discount <= 1 or not timeout_seconds > 0:
            raise ConfigError(
                f"style = {style!r} must be 'concat' or 'individual', turn_discount = {turn_discount!r} in (0, 1], and "
                f"timeout_seconds = {timeout_seconds!r} positive"
            )
        super().__init__(gconfig, tokenizer)
        self.agent = resolve_agent(agent)
        self.style: ExportStyle = style
        self.turn_discount = turn_discount
        self.timeout_seconds = timeout_seconds
        tool_format(tokenizer, tool_call_parser)  # raises for an unknown name before the run starts
        self._runs = make_runs(self.agent, workers)
        self._serving = SharedServer(tokenizer, tool_call_parser, processor, self._runs.host)

    async def aclose(self) -> None:
        """End the agent's workers."""
        await self._runs.close()

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor] | None:
        """Return one group, one or more rows per run; failed runs are dropped and counted.

        If all runs fail, the first failure is raised.
        """
        async with self._serving.lease() as (server, base_url):
            runs = (self._run_one(engine, data, index, server, base_url) for index in range(self.gconfig.n_samples))
            outcomes = await asyncio.gather(*runs, return_exceptions=True)
        rows: list[Trajectory] = []
        runs_of_rows: list[int] = []
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, BaseException):
                raise outcome
            rows += outcome
            runs_of_rows += [index] * len(outcome)
        if not rows:
            raise next(iter(workflow_context.get().first_errors.values()))
        group = trajectory_tensors([row.record for row in rows], [row.reward for row in rows], runs_of_rows)
        return add_temperatures(group, [row.record for row in rows], self.gconfig.temperature)

    async def _run_one(
        self, engine: InferenceEngine, data: dict[str, Any], index: int, server: AgentServer, base_url: str
    ) -> list[Trajectory]:
        """Return the trajectories of one run; a failed run is counted and returns none."""
        workflow_context.enter_sample(index)
        one = self.gconfig.model_copy(update={"n_samples": 1})
        policy = engine.agent_sampling if isinstance(engine, EpisodeEngine) else None
        session = server.sessions.open(engine, one, derive_seed(workflow_context.get().seed, index), policy)
        try:
            reward = await self._runs.run(data, base_url, session.key, self.timeout_seconds)
            set_session_rewards(session, reward)
            rows = session.export(self.style, self.turn_discount)
        except ConfigError:
            raise
        except Exception as error:
            if session.refusal is not None:
                raise session.refusal from error  # the agent requested untrainable sampling parameters
            workflow_context.drop(_kind(error), error)
            return []
        finally:
            server.sessions.close(session)
        record_session(session, rows)
        return rows


def record_session(session: Session, rows: Sequence[Trajectory]) -> None:
    """Record the number of answers in a session, and of untrained, overridden or uncorrected answers."""
    answered = len(session.interactions)
    counts = {
        "answers": answered,
        "answers_unrewarded": answered - len({index for row in rows for index in row.answers}),
        "answers_broken_off": session.unfinished,
    }
    policy = session.policy
    if isinstance(policy, SamplingPolicy) and policy.mode == "override":
        counts["answers_overridden"] = session.overridden
    elif isinstance(policy, SamplingPolicy) and policy.mode == "allow":
        counts["answers_uncorrected"] = sum(bool(truncating_fields(node.gconfig)) for node in session.interactions)
    workflow_context.record(**{f"agent_{name}": count for name, count in counts.items()})


def _kind(error: Exception) -> str:
    if isinstance(error, RewardFailure):
        return f"reward_{error.kind}"
    if isinstance(error, InvalidRewardError):
        return f"reward_{RewardInvalid.kind}"
    return error.kind if isinstance(error, UnusableAnswerError | AgentFailure) else "agent_raised"


def set_session_rewards(session: Session, reward: float | Mapping[str, float]) -> None:
    """Set the rewards that the agent returned."""
    if not isinstance(reward, Mapping):
        session.reward_every_branch(reward)
        return
    for completion, value in reward.items():
        session.set_reward(value, completion)


def resolve_agent(agent: Agent | type[Agent] | str) -> Agent:
    """Return the agent instance that `agent` is or names; raise `ConfigError` without `async def run`."""
    resolved: Any = import_dotted(agent, "agent") if isinstance(agent, str) else agent
    if isinstance(resolved, type):
        try:
            resolved = resolved()
        except TypeError as error:
            raise ConfigError(f"agent class {resolved.__qualname__}: {error}; pass an instance") from None
    if not asyncio.iscoroutinefunction(getattr(resolved, "run", None)):
        raise ConfigError(f"agent: got {agent!r}, expected an object with `async def run(self, data, **extra_kwargs)`")
    instance: Agent = resolved
    return instance


class SharedServer:
    """Server shared by all running episodes; it closes after the last one."""

    def __init__(
        self,
        tokenizer: Any,
        tool_call_parser: str | None = None,
        reader: ImageReader | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self._tokenizer, self._tool_call_parser, self._reader = tokenizer, tool_call_parser, reader
        self._host = host
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()
        self._users = 0
        self._live: tuple[AgentServer, str] | None = None

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[tuple[AgentServer, str]]:
        """Yield (server, base URL)."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # of an earlier run
            self._loop, self._lock, self._users, self._live = loop, asyncio.Lock(), 0, None
        async with self._lock:
            live = self._live = self._live or await self._start()
            self._users += 1
        try:
            yield live
        finally:
            async with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._live = None
                    await live[0].close()

    async def _start(self) -> tuple[AgentServer, str]:
        require_package("httpx")
        from archon.serve.server import AgentServer
        from archon.serve.service import Limits

        # Only the trainer sends requests: the limits are practically off.
        n = 1_000_000
        limits = Limits(body_bytes=1 << 30, sessions=n, calls_per_session=n, requests=n, session_idle_seconds=math.inf)
        token, parser = secrets.token_urlsafe(), self._tool_call_parser
        server = AgentServer(self._tokenizer, token=token, limits=limits, tool_call_parser=parser, reader=self._reader)
        return server, await server.start(self._host)
