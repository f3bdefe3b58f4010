"""One inference server: its requests, its weight version and its health."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import Full, Queue
from threading import Event
from typing import get_args

from archon.remote.answer_checks import Answer, Expected, Fields, check_answer
from archon.remote.dialects.base import Dialect, Sampling, SleepTag, Transport
from archon.remote.http import Http, ServerError
from archon.remote.versions import WireVersions
from archon.remote.weight_stream import Bucket
from archon.schema.errors import RolloutError

POLL_SECONDS = 0.05


class BucketQueue:
    """A short queue of weight buckets for one server, so that servers load at different speeds while ranks gather."""

    def __init__(self) -> None:
        self._queue: Queue[Bucket | Exception | None] = Queue(maxsize=2)
        self._closed = Event()

    def put(self, bucket: Bucket | Exception | None) -> None:
        """Wait for space and enqueue; return at once if the queue is closed.

        Args:
            bucket: a bucket, None at the end of the weights, or the trainer's exception.
        """
        while not self._closed.is_set():
            try:
                self._queue.put(bucket, timeout=POLL_SECONDS)
            except Full:
                continue
            return

    def close(self) -> None:
        """Discard further buckets: the server has all weights, or failed."""
        self._closed.set()

    def __iter__(self) -> Iterator[Bucket]:
        """Yield the buckets. Raises ServerError if the trainer failed, because the weights are incomplete."""
        while (bucket := self._queue.get()) is not None:
            if isinstance(bucket, Exception):
                raise ServerError(f"the trainer did not gather all weights: {bucket}")
            yield bucket


@dataclass(frozen=True)
class Limits:
    """Limits on maximum and mean of |Δ logprob| between trainer and server over the probe tokens."""

    largest: float
    mean: float


@dataclass(frozen=True)
class Push:
    """Weights for servers to load, and the trainer's scores that verify them.

    Attributes:
        transport: how servers receive the weights.
        version: version of the weights.
        probe: L token ids that servers score.
        expected: the trainer's logprobs of probe tokens 1 to L − 1 at temperature 1, computed while servers load.
        limits: limits on |Δ logprob| of a verified push.
        seconds: time-out of each request.
        folder: folder of the written weights; None for a broadcast.
        delta: folder with the elements that changed since version `since`; None: no delta.
        since: the base version of `delta`.
        buckets: weights for one server, if they are broadcast.
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
    """A connected server.

    Attributes:
        http: client of the server.
        dialect: wire protocol of the server.
        model: model name in requests.
        versions: names of this trainer's versions on the server.
        version: version of the last verified push; None before the first.
        verified: versions of all verified pushes.
        replaced: version that the server verifiably had until the last push; None: unknown.
        failure: why the server is out of the fleet; None for a healthy server. A verified push clears it, as does a
            verified version if all servers failed.
        running: number of requests in flight.
        answers: number of answers to this process.
        tokens: number of tokens in these answers.
        pushing: the server is receiving weights and accepts requests only after their verification.
        asleep: the server has freed its GPU for the trainer and accepts requests only after it is awake.
    """

    http: Http
    dialect: Dialect
    model: str
    versions: WireVersions
    version: int | None = None
    failure: str | None = None
    verified: set[int] = field(default_factory=set, repr=False)
    replaced: int | None = None
    running: int = 0
    answers: int = 0
    tokens: int = 0
    pushing: bool = False
    asleep: bool = False

    @property
    def url(self) -> str:
        """URL of the server."""
        return self.http.url

    def move(self, url: str) -> None:
        """Switch to the restarted server at `url`, which has no pushed weights yet."""
        self.http, self.version, self.verified, self.asleep = Http(url), None, set(), False
        self.failure = self.failure or f"{url} waits for its first push"

    async def generate(self, sampling: Sampling, seconds: float, vocab_size: int, expert_bytes: int = 0) -> Answer:
        """Return the server's checked answer to one request.

        An answer that arrives during a push waits for its end, because its weights may not be verified yet. An answer
        without versions that overlaps a push has an unknown version: it is returned as interrupted, without tokens.

        Args:
            sampling: the request.
            seconds: limit of the whole request.
            vocab_size: number of token ids.
            expert_bytes: bytes of routed experts that the response may hold for each token.

        Raises:
            ServerError: the request failed, a field of the answer is wrong, or a token was sampled with weights that
                were not pushed and verified.
        """
        path, body = self.dialect.request(sampling)
        n_prompt = len(sampling.prompt)
        max_bytes = self.dialect.answer_bytes(n_prompt + sampling.limit) + expert_bytes * (n_prompt + sampling.limit)
        self.running += 1
        version = self.version
        try:
            response = Fields(self.url, await self.http.answer(path, body, seconds, max_bytes))
        finally:
            self.running -= 1
        context = self.dialect.facts.max_seq_len - self.dialect.reserved_tokens
        full = min(sampling.limit, max(1, context - n_prompt))
        expected = Expected(vocab_size, sampling.limit, full, sampling.stop_token_ids, sampling.gconfig)
        answer = check_answer(self.dialect.answer(response), expected)
        while self.pushing:  # noqa: ASYNC110 - another thread pushes
            await asyncio.sleep(POLL_SECONDS)
        if not answer.versions and self.version != version:
            if answer.stop_reason != "abort" or self.replaced != version:
                return Answer([], [], "abort")
            answer.versions = [(str(version), 0, len(answer.tokens))]
        elif not answer.versions:
            name = await self.dialect.current_version(self.http)
            if self.version != version or self.pushing:
                return Answer([], [], "abort")
            answer.versions = [(str(self._verified_version(name, version)), 0, len(answer.tokens))]
        else:
            answer.versions = [
                (str(self._verified_version(name, version)), start, end) for name, start, end in answer.versions
            ]
        self.answers += 1
        self.tokens += len(answer.tokens)
        return answer

    def _verified_version(self, name: str, oldest: int | None) -> int:
        """Return the version that the server names. Raises ServerError if it was not pushed, or is older than `oldest`.

        Another trainer has the same version numbers, so that only the name on the wire distinguishes its weights.
        """
        version = self.versions.decode(name)
        if version is None or version not in self.verified or oldest is None or version < oldest:
            fix = "give each trainer its own servers" if self.versions.is_foreign(name) else "was it restarted?"
            raise ServerError(
                f"{self.url} answered with weights of {self.versions.describe(name)}, but the last push was version "
                f"{oldest}; {fix}"
            )
        return version

    def require_version(self) -> None:
        """Raise ServerError unless the server has the weights of the last verified push."""
        self._verified_version(self.dialect.version(self.http), self.version)

    def check_health(self, seconds: float) -> None:
        """Raise ServerError or RefusedError unless the server generates one token.

        A hung server can still report that it is healthy.
        """
        self.dialect.score(self.http, self.model, [0, 0], seconds)

    def sleep(self, seconds: float) -> None:
        """Free the server's GPU. Unfinished answers end with their current tokens and continue later.

        If this request fails, the server counts as asleep until the next push.
        """
        self.asleep = True
        self.dialect.sleep(self.http, seconds)

    def wake(self, seconds: float) -> None:
        """Let a sleeping server take back its GPU memory, with unchanged weights."""
        if not self.asleep:
            return
        try:
            for tag in get_args(SleepTag):
                self.dialect.wake(self.http, tag, seconds)
        finally:
            self.asleep = False

    def push(self, push: Push) -> float:
        """Replace the server's weights, and return the largest |Δ logprob| between server and trainer.

        Raises:
            RolloutError: the push failed, or the server has another version or other scores afterwards. The server
                stays paused and out of the fleet. If another trainer has pushed to it, it is not paused.
        """
        self.pushing = True
        try:
            # 1. Leave the server alone if another trainer uses it.
            if not self.asleep:
                self._replaced_version()
            # 2. Load the weights, as a delta if the server has its base version.
            self.dialect.pause(self.http, abort=True)
            if self.asleep:  # the cache stays free, because loading needs memory too
                self.dialect.wake(self.http, "weights", push.seconds)
            self.replaced = self._replaced_version()
            version = self.versions.encode(push.version)
            if push.buckets is not None:
                model = self.dialect.receive(self.http, push.transport, push.buckets, version, push.seconds)
            else:
                patched = push.delta is not None and self.failure is None and self.version == push.since
                folder = push.delta if patched else push.folder
                since = self.versions.encode(push.since) if patched and push.since is not None else None
                model = self.dialect.load(self.http, push.transport, str(folder), version, push.seconds, since)
            # 3. Verify them.
            self._require_version(push)
            push.expected.result()  # stay paused until the scores can be compared
            if self.asleep:
                self.dialect.wake(self.http, "kv_cache", push.seconds)
            self.dialect.resume(self.http)
            try:
                largest = self._compare(push, model)
            except Exception:
                self.dialect.pause(self.http, abort=True)  # no answers with wrong weights
                raise
            self.accept(model, push.version)
        except RolloutError as error:
            self.failure = str(error)
            raise
        finally:
            self.pushing = self.asleep = False
            if push.buckets is not None:
                push.buckets.close()
        return largest

    def verify(self, push: Push) -> None:
        """Raise ServerError unless the server still has the weights of `push`."""
        self._require_version(push)
        self._compare(push, self.model)

    def _require_version(self, push: Push) -> None:
        name = self.dialect.version(self.http)
        if self.versions.decode(name) != push.version:
            raise ServerError(
                f"{self.url} has weights of {self.versions.describe(name)} after a push of version {push.version}"
            )

    def _replaced_version(self) -> int | None:
        """Return the version of the weights that a push replaces; None if the server may have had other weights.

        Raises ServerError if another trainer has pushed its weights to a server that this trainer uses.
        """
        if self.version is None or self.failure is not None:
            return None
        name = self.dialect.version(self.http)
        if self.versions.is_foreign(name):
            raise ServerError(
                f"{self.url} has weights of {self.versions.describe(name)} since the last push, version "
                f"{self.version}; give each trainer its own servers"
            )
        return self.versions.decode(name)

    def _compare(self, push: Push, model: str) -> float:
        """Return the largest |Δ logprob| of the probe tokens. Raises ServerError if it exceeds the limits."""
        scores = self.dialect.score(self.http, model, push.probe, push.seconds)
        expected = push.expected.result()
        differences = [abs(a - b) for a, b in zip(expected, scores, strict=True)]
        largest, mean, limits = max(differences), sum(differences) / len(differences), push.limits
        if not (largest <= limits.largest and mean <= limits.mean):  # also fails for NaN
            raise ServerError(
                f"{self.url} scores the probe tokens up to {largest:.1e} away from the trainer after a push of "
                f"version {push.version} (limit {limits.largest:.1e}), and {mean:.1e} on average (limit "
                f"{limits.mean:.1e}); it did not load all weights, or modifies them"
            )
        return largest

    def accept(self, model: str, version: int) -> None:
        """Return the server to the fleet after a verified push."""
        self.model, self.version, self.failure = model, version, None
        self.verified.add(version)
