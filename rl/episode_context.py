"""The episode that a workflow runs in: what it is, its statistics, its HTTP clients and its view of the engine."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from archon.generation.seeds import derive_seed
from archon.rl.clients import aiohttp_session, http_client, loop_client

if TYPE_CHECKING:
    import aiohttp
    import httpx

    from archon.generation.types import GenerationHyperparameters, InferenceEngine, ModelRequest, ModelResponse


@dataclass
class EpisodeContext:
    """One episode: one prompt run through a workflow.

    Attributes:
        task_id: the prompt's place in the data stream.
        is_eval: whether this is an evaluation.
        seed: its random streams derive from it.
        sample_index: the answer of the group that the running task works on; None: all of them.
        drops: lost samples by kind.
        first_errors: the first error of each kind.
        numbers: what `record` was given, by name.
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
    """Access to the episode that the calling coroutine belongs to; import the one instance, `workflow_context`."""

    def get(self) -> EpisodeContext:
        """Returns the running episode; a new one where a workflow is called by hand, outside a rollout."""
        context = _current.get(None)
        if context is None:
            context = EpisodeContext()
            _current.set(context)
        return context

    def stat_scope(self) -> str:
        """Returns "rollout", or "eval" while the trainer evaluates."""
        return "eval" if self.get().is_eval else "rollout"

    def record(self, **numbers: float) -> None:
        """Add numbers to the step's metrics, in an evaluation under `eval/`; each name is averaged over everything
        recorded under it."""
        for name, value in numbers.items():
            self.get().numbers[name].append(float(value))

    def drop(self, kind: str, error: BaseException) -> None:
        """Count one lost sample of this episode under `kind`; it is logged with its error, and never scored 0."""
        self.get().drop(kind, error)

    async def get_httpx_client(self) -> httpx.AsyncClient:
        """Returns the event loop's own client, closed with it: for `AsyncOpenAI`, or for tools."""
        return await loop_client(http_client, lambda client: client.is_closed, lambda client: client.aclose())

    async def get_aiohttp_session(self) -> aiohttp.ClientSession:
        """Returns the event loop's own session, closed with it."""
        return await loop_client(aiohttp_session, lambda session: session.closed, lambda session: session.close())

    def enter_sample(self, index: int) -> EpisodeContext:
        """Make the running task one that works on answer `index` of its episode, and return its context."""
        own = copy(self.get())  # drops and numbers stay the episode's
        own.sample_index = index
        _current.set(own)
        return own

    def enter(self, context: EpisodeContext) -> None:
        """Make `context` that of the running task and of the tasks it starts."""
        _current.set(context)


workflow_context = WorkflowContext()


class EpisodeEngine:
    """The generator as one run of an episode sees it.

    Each request without a seed gets one from (the episode's seed, its number within the episode), so that what is
    sampled does not depend on what else is running, and a resumed run repeats it. `check` sees every request's sampling
    values first.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        context: EpisodeContext,
        check: Callable[[GenerationHyperparameters], None] | None = None,
    ) -> None:
        self._engine = engine
        self._context = context
        self._check = check
        self._requests = 0

    @property
    def version(self) -> int:
        return self._engine.version

    def get_version(self) -> int:
        return self._engine.version

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Answer one request; raises `RolloutError` for values that `check` refuses."""
        if self._check is not None:
            self._check(req.gconfig)
        if req.gconfig.seed is None:
            # model_copy, not new(): the values were validated, and this runs for every sample.
            seed = derive_seed(self._context.seed, self._requests)
            req.gconfig = req.gconfig.model_copy(update={"seed": seed})
        self._requests += 1
        return await self._engine.agenerate(req)

    def pause(self) -> None:
        self._engine.pause()

    def resume(self) -> None:
        self._engine.resume()

    def abort(self, rid: str | None = None) -> int:
        return self._engine.abort(rid)

    def update_weights(self, meta: object, *, version: int | None = None) -> None:
        self._engine.update_weights(meta, version=version)
