"""The context of an episode for its workflow: identity, statistics, HTTP clients and the engine."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from archon.generation.seeds import derive_seed
from archon.remote.clients import http_client, loop_client, loop_session
from archon.schema.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    import aiohttp
    import httpx

    from archon.generation.types import GenerationHyperparameters, InferenceEngine, ModelRequest, ModelResponse
    from archon.rl.agent_sampling import SamplingPolicy


@dataclass
class EpisodeContext:
    """Context of one episode.

    Attributes:
        task_id: the prompt's position in the data stream.
        is_eval: whether this is an evaluation.
        seed: seed of its random streams.
        sample_index: the sample that the running task works on; None: all samples.
        drops: number of dropped samples by kind.
        first_errors: first error of each kind.
        numbers: values passed to `record`, by name.
    """

    task_id: int = 0
    is_eval: bool = False
    seed: int = 0
    sample_index: int | None = None
    drops: Counter[str] = field(default_factory=Counter)
    first_errors: dict[str, BaseException] = field(default_factory=dict)
    numbers: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def drop(self, kind: str, error: BaseException) -> None:
        """Count one dropped sample under `kind`."""
        self.drops[kind] += 1
        self.first_errors.setdefault(kind, error)


_current: ContextVar[EpisodeContext] = ContextVar("archon_episode")


class WorkflowContext:
    """Access to the episode of the calling coroutine; import the instance `workflow_context`."""

    def get(self) -> EpisodeContext:
        """Return the running episode; outside a rollout, a new one."""
        context = _current.get(None)
        if context is None:
            context = EpisodeContext()
            _current.set(context)
        return context

    def stat_scope(self) -> str:
        """Return "rollout", or "eval" while the trainer evaluates."""
        return "eval" if self.get().is_eval else "rollout"

    def record(self, **numbers: float) -> None:
        """Add numbers to the step's metrics, averaged by name; evaluations prefix them with `eval/`."""
        for name, value in numbers.items():
            self.get().numbers[name].append(float(value))

    def drop(self, kind: str, error: BaseException) -> None:
        """Count one dropped sample under `kind` and log its error; it is never scored 0."""
        self.get().drop(kind, error)

    async def get_httpx_client(self) -> httpx.AsyncClient:
        """Return the event loop's shared client; it closes with the loop."""
        return await loop_client(http_client, lambda client: client.is_closed, lambda client: client.aclose())

    async def get_aiohttp_session(self) -> aiohttp.ClientSession:
        """Return the event loop's shared session; it closes with the loop."""
        return await loop_session()

    def enter_sample(self, index: int) -> EpisodeContext:
        """Set the sample index of the running task, and return its context."""
        context = copy(self.get())  # shares drops and numbers with the episode
        context.sample_index = index
        _current.set(context)
        return context

    def enter(self, context: EpisodeContext) -> None:
        """Set the context of the running task and of the tasks it starts."""
        _current.set(context)


workflow_context = WorkflowContext()


async def answers(engine: InferenceEngine, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
    """Return the answers to concurrent requests, in order.

    `agenerate_batch` is preferred: for a small model, one asyncio task per answer costs as much as its tokens. A
    subclass or instance that overrides `agenerate` alone is respected.
    """
    kinds = (getattr(engine, "__dict__", {}), *map(vars, type(engine).__mro__))
    names = next((kind for kind in kinds if "agenerate" in kind or "agenerate_batch" in kind), {})
    if "agenerate_batch" in names:
        batch: Callable[..., Awaitable[list[ModelResponse]]] = engine.agenerate_batch  # type: ignore[attr-defined]
        return await batch(requests)
    return list(await asyncio.gather(*map(engine.agenerate, requests)))


class EpisodeEngine:
    """Engine of one episode.

    Requests without a seed get one from the episode's seed and the request number: samples do not depend on concurrent
    episodes, and a resumed run repeats them. `check` validates the sampling parameters of every request unless a server
    applied `agent_sampling` before. `responses` collects the engine's responses.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        context: EpisodeContext,
        check: Callable[[GenerationHyperparameters], None] | None = None,
        agent_sampling: SamplingPolicy | None = None,
    ) -> None:
        self._engine = engine
        self._context = context
        self._check = check
        inner = engine.agent_sampling if isinstance(engine, EpisodeEngine) else None
        self.agent_sampling: SamplingPolicy | None = agent_sampling or inner
        self._requests = 0
        self.responses: list[ModelResponse] = []

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self._engine.version

    @property
    def generator(self) -> InferenceEngine:
        """Engine that outlives the episode."""
        return self._engine.generator if isinstance(self._engine, EpisodeEngine) else self._engine

    def get_version(self) -> int:
        """Return the version of the weights."""
        return self._engine.version

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Answer one request; raise the error of `check` for refused parameters."""
        self._prepare(req)
        response = await self._engine.agenerate(req)
        self.responses.append(response)
        return response

    async def agenerate_batch(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Answer concurrent requests, in order."""
        for request in requests:
            self._prepare(request)
        responses = await answers(self._engine, requests)
        self.responses += responses
        return responses

    def _prepare(self, req: ModelRequest) -> None:
        if self._check is not None and not req.sampling_checked:
            self._check(req.gconfig)
        if self._check is not None and req.constraint is not None:
            raise ConfigError(
                f"request {req.rid} constrains its answer, but the trainer cannot recompute the logprobs of "
                "constrained sampling; remove the constraint (evaluation may use one)"
            )
        if req.gconfig.seed is None:
            # model_copy skips the validation of new(); this runs for every sample.
            seed = derive_seed(self._context.seed, self._requests)
            req.gconfig = req.gconfig.model_copy(update={"seed": seed})
        self._requests += 1
        req.metadata.setdefault("group", self._context.seed)  # routes a group to the engine that caches its prompt

    def prompt_logprobs(self, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Return the engine's `prompt_logprobs`; raise `RolloutError` if it has none."""
        if not hasattr(self._engine, "prompt_logprobs"):
            raise RolloutError(f"{type(self._engine).__name__} does not compute prompt logprobs")
        logprobs: list[float] = self._engine.prompt_logprobs(ids, temperature)
        return logprobs

    def pause(self) -> None:
        """Pause sampling."""
        self._engine.pause()

    def resume(self) -> None:
        """Resume sampling."""
        self._engine.resume()

    def abort(self, rid: str | None = None) -> int:
        """Abort unfinished requests; return their number."""
        return self._engine.abort(rid)

    def update_weights(self, meta: object, *, version: int | None = None) -> None:
        """Load new weights."""
        self._engine.update_weights(meta, version=version)
