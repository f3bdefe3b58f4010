"""One inference server: its dialect, its requests, and whether it may be asked."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from archon.remote.dialects.base import Answer, Dialect, Sampling, Transport
from archon.remote.feed import BucketQueue
from archon.remote.http import Http, ServerError

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Limits:
    """The largest |Δ logprob| between trainer and server over a probe's tokens, and the largest mean, of a push that
    succeeded.
    """

    largest: float
    mean: float


@dataclass(frozen=True)
class Push:
    """Weights for servers to load, and how the trainer scores them.

    Attributes:
        version: of the weights.
        probe: the tokens that servers score.
        expected: the trainer's logprobs of the probe's tokens 1 to L − 1 at temperature 1, computed while servers load.
        limits: of |Δ logprob| for a push that succeeded.
        seconds: time-out of each request.
        folder: where they were written.
        delta, since: the folder with the elements that changed since another version, for servers that have that.
        buckets: the weights of one server where they are broadcast instead.
    """

    transport: Transport
    version: int
    probe: list[int]
    expected: Future[list[float]]
    limits: Limits
    seconds: float
    folder: Path | None = None
    delta: Path | None = None
    since: int | None = None
    buckets: BucketQueue | None = None


@dataclass
class RemoteServer:
    """A server that was connected.

    Attributes:
        model: the name that requests give.
        version: of its weights, once they were pushed and verified.
        verified: the versions of all pushes to it that were.
        failure: why it is out of the fleet; None: it is in it. A server comes back by a push that is verified,
            or, where all are out, once it is verified to have the weights of the last.
        running: requests that it is answering.
        answers, tokens: that it gave this process.
        pushing: whether it is getting weights, and must not be asked before they are verified.
    """

    http: Http
    dialect: Dialect
    model: str
    version: int | None = None
    failure: str | None = None
    verified: set[str] = field(default_factory=set, repr=False)
    running: int = 0
    answers: int = 0
    tokens: int = 0
    pushing: bool = False

    @property
    def url(self) -> str:
        return self.http.url

    def move(self, url: str) -> None:
        """Make `url` that of the server, which was started anew elsewhere and has no weights of the trainer's."""
        self.http, self.version, self.verified = Http(url), None, set()
        self.failure = self.failure or f"{url} awaits its first push"

    async def generate(self, sampling: Sampling, seconds: float) -> Answer:
        """Return the server's answer. Raises ServerError unless every token is of weights that were pushed to it.

        An answer that comes during a push waits for its end, as it may be of weights that are not verified yet. One
        that names no versions, and came over the end of a push, may be of the weights of before or after it: it is
        returned without tokens, as interrupted.
        """
        path, body = self.dialect.request(sampling)
        self.running += 1
        given = self.version
        try:
            answer = self.dialect.answer(await self.http.answer(path, body, seconds))
        finally:
            self.running -= 1
        while self.pushing:  # noqa: ASYNC110 - another thread pushes
            await asyncio.sleep(POLL_SECONDS)
        if not answer.versions:
            if answer.stop_reason != "abort" and self.version != given:
                return Answer([], [], "abort")
            answer.versions = [(str(given), 0, len(answer.tokens))]
        for name, *_ in answer.versions:
            if name not in self.verified or given is None or int(name) < given:
                raise ServerError(
                    f"{self.url} answered with weights of version {name!r}, and it was given {given}; was it "
                    "restarted, or updated by others?"
                )
        self.answers += 1
        self.tokens += len(answer.tokens)
        return answer

    def check_health(self, seconds: float) -> None:
        """Raise ServerError or RefusedError unless the server completes one token; a wedged one may still say that it
        is well.
        """
        self.dialect.score(self.http, self.model, [0, 0], seconds)

    def push(self, push: Push) -> float:
        """Replace the server's weights, and returns the largest |Δ logprob| between it and the trainer.

        Raises ServerError, leaving the server paused, where it fails, has another version afterwards, or scores the
        probe otherwise.
        """
        self.dialect.pause(self.http, abort=True)
        model = self._load(push)
        self._require_version(push)
        push.expected.result()  # nobody is answered while the weights cannot be compared
        self.dialect.resume(self.http)
        try:
            largest = self._compare(push, model)
        except Exception:
            self.dialect.pause(self.http, abort=True)  # so that nobody is answered with wrong weights
            raise
        self.accept(model, push.version)
        return largest

    def verify(self, push: Push) -> None:
        """Raise ServerError unless the server has the weights of an earlier push."""
        self._require_version(push)
        self._compare(push, self.model)

    def _require_version(self, push: Push) -> None:
        if (found := self.dialect.version(self.http)) != str(push.version):
            raise ServerError(f"{self.url} has weights of version {found} after a push of version {push.version}")

    def _compare(self, push: Push, model: str) -> float:
        """Return the largest |Δ logprob| of the probe's tokens. Raises ServerError where it is beyond the limits."""
        scores = self.dialect.score(self.http, model, push.probe, push.seconds)
        expected = push.expected.result()
        if len(scores) != len(expected):
            raise ServerError(f"{self.url} scored {len(scores)} tokens of a probe, expected {len(expected)}")
        differences = [abs(own - theirs) for own, theirs in zip(expected, scores, strict=True)]
        largest, mean, limits = max(differences), sum(differences) / len(differences), push.limits
        if not (largest <= limits.largest and mean <= limits.mean):  # NaN as well
            raise ServerError(
                f"{self.url} scores the tokens of a probe up to {largest:.1e} away from the trainer after a push of "
                f"version {push.version} (limit {limits.largest:.1e}), and {mean:.1e} on average (limit "
                f"{limits.mean:.1e}); it did not load all weights, or computes with others"
            )
        return largest

    def _load(self, push: Push) -> str:
        """Give the server the weights, without verifying them. Returns the model's name for requests."""
        if push.buckets is not None:
            return self.dialect.receive(self.http, push.transport, push.buckets, push.version, push.seconds)
        patched = push.delta is not None and self.failure is None and self.version == push.since
        folder, since = (push.delta, push.since) if patched else (push.folder, None)
        return self.dialect.load(self.http, push.transport, str(folder), push.version, push.seconds, since)

    def accept(self, model: str, version: int) -> None:
        """Take the server into the fleet, with weights that it was given and that were verified."""
        self.model, self.version, self.failure = model, version, None
        self.verified.add(str(version))
