"""Trains an agent: a user's program that calls the model over HTTP and returns a reward."""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
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
from archon.schema.errors import ConfigError, RolloutError
from archon.schema.lazy import import_dotted
from archon.serve.sessions import ExportStyle, InvalidRewardError, Session, Trajectory
from archon.serve.tool_calls import tool_format

if TYPE_CHECKING:
    from archon.serve.server import AgentServer


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
        """Return the reward that the command printed; raises `RolloutError` where it failed or printed none."""
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


class AgentWorkflow(SamplingWorkflow):
    """Runs an agent `gconfig.n_samples` times on a row, each time in its own session; all rows form one group.

    The agent's `run` gets the row, `base_url` and `api_key` of a local server with OpenAI's protocols (Anthropic's
    clients need the URL without its /v1), and `http_client`, an `httpx.AsyncClient` for `AsyncOpenAI`. It runs on the
    trainer's event loop, which a blocking call would stop, generation included: use asynchronous clients, or
    `ProcessAgent`. Sampling parameters that a request does not set are those of `gconfig`; those that it sets are
    subject to `rollout.agent_sampling`, except in an evaluation. With `workers` on other nodes it runs there, and the
    server listens where they reach it.

    A number is the episode's reward, for each of its branches; a dictionary rewards the completions that it names. An
    agent that raises, times out, is lost with its worker or returns no finite number costs that sample, and is counted
    by kind. Answers that it
    breaks off while they are sampled are not trained, and are counted.

    Args:
        agent: an object, a class that is constructed without arguments, or the dotted path of either.
        gconfig: sampling parameters; `n_samples` is the number of runs per row.
        tokenizer: renders prompts; its end-of-text and padding ids stop an answer.
        style: `concat` trains a conversation as one row, `individual` each answer as its own row.
        turn_discount: factor of the reward for each later answer, in (0, 1]; see `Session.export`.
        timeout_seconds: limit of one run of the agent.
        tool_call_parser: name of the format in which the model calls tools, such as `hermes`; None: that of its chat
            template.
        processor: reads the pictures that the agent sends; None for a model that sees none.
        workers: where the agent runs; None: here.
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
        tool_format(tokenizer, tool_call_parser)  # refuses an unknown name before the run starts
        self._runs = make_runs(self.agent, workers)
        self._serving = SharedServer(tokenizer, tool_call_parser, processor, self._runs.host)

    async def aclose(self) -> None:
        """End the agent's workers."""
        await self._runs.close()

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor] | None:
        """Return one group of trajectory tensors, one or more rows per run. Runs that fail are dropped and counted.

        Raises the first failure where all of them fail.
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
        """Return the trajectories of one run of the agent; a run that failed is counted and returns none."""
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
                raise session.refusal from error  # it requested sampling parameters that cannot be trained on
            workflow_context.drop(_kind(error), error)
            return []
        finally:
            server.sessions.close(session)
        record_session(session, rows)
        return rows


def record_session(session: Session, rows: Sequence[Trajectory]) -> None:
    """Record how many answers a session has, and how many of them were not trained or not as asked."""
    answered = len(session.interactions)
    counts = {
        "answers": answered,
        "answers_unrewarded": answered - len({place for row in rows for place in row.answers}),
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
    """Set the rewards that the agent returned in its session."""
    if not isinstance(reward, Mapping):
        session.reward_every_branch(reward)
        return
    for completion, value in reward.items():
        session.set_reward(value, completion)


def resolve_agent(agent: Agent | type[Agent] | str) -> Agent:
    """Return the agent that `agent` is or names; raises `ConfigError` unless it has `async def run`."""
    found: Any = import_dotted(agent, "agent") if isinstance(agent, str) else agent
    if isinstance(found, type):
        try:
            found = found()
        except TypeError as error:
            raise ConfigError(f"agent class {found.__qualname__}: {error}; give it as an instance") from None
    if not asyncio.iscoroutinefunction(getattr(found, "run", None)):
        raise ConfigError(f"agent: got {agent!r}, expected an object with `async def run(self, data, **extra_kwargs)`")
    resolved: Agent = found
    return resolved


class SharedServer:
    """A server that all running episodes share; it is closed when the last of them ends."""

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

        # The requests are the trainer's own, so the limits are practically off.
        n = 1_000_000
        limits = Limits(body_bytes=1 << 30, sessions=n, calls_per_session=n, requests=n, session_idle_seconds=math.inf)
        token, parser = secrets.token_urlsafe(), self._tool_call_parser
        server = AgentServer(self._tokenizer, token=token, limits=limits, tool_call_parser=parser, reader=self._reader)
        return server, await server.start(self._host)
