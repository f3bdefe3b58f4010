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
from archon.schema.errors import RolloutError

if TYPE_CHECKING:
    import aiohttp
    import httpx

    from archon.generation.types import GenerationHyperparameters, InferenceEngine, ModelRequest, ModelResponse
    from archon.rl.agent_sampling import SamplingPolicy


@dataclass
class EpisodeContext:
    """One episode: one prompt run through a workflow.

    Attributes:
        task_id: the prompt's position in the data stream.
        is_eval: whether this is an evaluation.
        seed: the seed of its random streams.
        sample_index: the answer of the group that the running task works on; None: all of them.
        drops: the number of lost samples by kind.
        first_errors: the first error of each kind.
        numbers: the values passed to `record`, by name.
    """

    task_id: int = 0
    is_eval: bool = False
    seed: int = 0
    sample_index: int | None = None
    drops: Counter[str] = field(default_factory=Counter)
    first_errors: dict[str, BaseException] = field(default_factory=dict)
    numbers: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def drop(self, kind: str, error: BaseException) -> None:
        """Count one lost sample under `kind`."""
        self.drops[kind] += 1
        self.first_errors.setdefault(kind, error)


_current: ContextVar[EpisodeContext] = ContextVar("archon_episode")


class WorkflowContext:
    """Access to the episode of the calling coroutine; import the instance `workflow_context`."""

    def get(self) -> EpisodeContext:
        """Return the running episode; a new one where a workflow is called outside a rollout."""
        context = _current.get(None)
        if context is None:
            context = EpisodeContext()
            _current.set(context)
        return context

    def stat_scope(self) -> str:
        """Return "rollout", or "eval" while the trainer evaluates."""
        return "eval" if self.get().is_eval else "rollout"

    def record(self, **numbers: float) -> None:
        """Add numbers to the step's metrics, under `eval/` in an evaluation; the metric is the mean of a name's
        values."""
        for name, value in numbers.items():
            self.get().numbers[name].append(float(value))

    def drop(self, kind: str, error: BaseException) -> None:
        """Count one lost sample of this episode under `kind`, and logs its error; it is never scored 0."""
        self.get().drop(kind, error)

    async def get_httpx_client(self) -> httpx.AsyncClient:
        """Return the event loop's shared client, which is closed with it."""
        return await loop_client(http_client, lambda client: client.is_closed, lambda client: client.aclose())

    async def get_aiohttp_session(self) -> aiohttp.ClientSession:
        """Return the event loop's shared session, which is closed with it."""
        return await loop_session()

    def enter_sample(self, index: int) -> EpisodeContext:
        """Make the running task work on answer `index` of its episode, and returns its context."""
        own = copy(self.get())  # shares drops and numbers with the episode
        own.sample_index = index
        _current.set(own)
        return own

    def enter(self, context: EpisodeContext) -> None:
        """Make `context` that of the running task and of the tasks that it starts."""
        _current.set(context)


workflow_context = WorkflowContext()


async def answers(engine: InferenceEngine, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
    """Return the answers to requests that are asked at the same time, in their order.

    An engine with `agenerate_batch` is asked once: in Python a task for each answer of a small model costs as much as
    its tokens. Not where `agenerate` alone was overridden, which would be passed by.
    """
    kinds = (getattr(engine, "__dict__", {}), *map(vars, type(engine).__mro__))
    names = next((kind for kind in kinds if "agenerate" in kind or "agenerate_batch" in kind), {})
    if "agenerate_batch" in names:
        batch: Callable[..., Awaitable[list[ModelResponse]]] = engine.agenerate_batch  # type: ignore[attr-defined]
        return await batch(requests)
    return list(await asyncio.gather(*map(engine.agenerate, requests)))


class EpisodeEngine:
    """The engine of one run of an episode.

    Each request without a seed gets one from the episode's seed and the request's number, so that samples do not depend
    on concurrent episodes and a resumed run repeats them. `check` is called with every request's sampling parameters,
    unless a server applied `agent_sampling` to them before. `responses` collects what the engine returned.
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
        return self._engine.version

    @property
    def generator(self) -> InferenceEngine:
        """Engine that outlives the episode."""
        return self._engine.generator if isinstance(self._engine, EpisodeEngine) else self._engine

    def get_version(self) -> int:
        return self._engine.version

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Answer one request; raises the error of `check` for parameters that it refuses."""
        self._prepare(req)
        response = await self._engine.agenerate(req)
        self.responses.append(response)
        return response

    async def agenerate_batch(self, requests: Sequence[ModelRequest]) -> list[ModelResponse]:
        """Answer requests at the same time, as `agenerate` does each; returns the answers in their order."""
        for request in requests:
            self._prepare(request)
        responses = await answers(self._engine, requests)
        self.responses += responses
        return responses

    def _prepare(self, req: ModelRequest) -> None:
        if self._check is not None and not req.sampling_checked:
            self._check(req.gconfig)
        if req.gconfig.seed is None:
            # model_copy, not new(): the values are validated, and this runs for every sample.
            seed = derive_seed(self._context.seed, self._requests)
            req.gconfig = req.gconfig.model_copy(update={"seed": seed})
        self._requests += 1
        req.metadata.setdefault("group", self._context.seed)  # engines answer a group where its prompt is cached

    def prompt_logprobs(self, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Return the engine's `prompt_logprobs`; raises `RolloutError` where it has none."""
        if not hasattr(self._engine, "prompt_logprobs"):
            raise RolloutError(f"{type(self._engine).__name__} does not compute the logprobs of given tokens")
        logprobs: list[float] = self._engine.prompt_logprobs(ids, temperature)
        return logprobs

    def pause(self) -> None:
        self._engine.pause()

    def resume(self) -> None:
        self._engine.resume()

    def abort(self, rid: str | None = None) -> int:
        return self._engine.abort(rid)

    def update_weights(self, meta: object, *, version: int | None = None) -> None:
        self._engine.update_weights(meta, version=version)
