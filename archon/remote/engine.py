"""Inference engine over servers in other processes."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from archon.generation.expert_record import Experts, decode_server_experts, join_records
from archon.generation.requests import max_answer_tokens, stop_ids
from archon.generation.seeds import derive_seed, request_seed
from archon.generation.types import ModelRequest, ModelResponse, integer_ids
from archon.models.args.base import BaseModelArgs
from archon.models.layers.routed_experts import routed_experts_sizes
from archon.parallel.control_plane import ControlPlane
from archon.remote.answer_checks import Answer
from archon.remote.config import PushConfig
from archon.remote.delta import write_delta
from archon.remote.dialects.base import BROADCAST_TRANSPORTS, Sampling, Transport
from archon.remote.http import RefusedError, ServerError
from archon.remote.server import POLL_SECONDS, BucketQueue, Limits, Push, RemoteServer
from archon.remote.weight_stream import pack, stream_device
from archon.schema.errors import ConfigError, RolloutError, UserError

# Measured with SmolLM2-135M. Float32 trainer against float32 vLLM: at most 5e-5 over chat prompts; over 256 vocabulary
# ids 1.2e-5 on average, with one outlier of 1.0e-3. Bfloat16 (transformers on CPU, |Δ logprob| from float32), without
# and with noise of 0.01 to 0.1 standard deviations on the tied embedding. "Stale head" keeps the old output head, a bug
# of vLLM's CPU build:
#                                maximum         mean             stale head (noise 0.1): maximum, mean
#   256 tokens of chat prompts   0.26 to 0.40    0.032 to 0.039   1.4, 0.25
#   the first 64 of them         0.24 to 0.40    0.042 to 0.073   1.4, 0.38
#   64 ids over the vocabulary   0.71 to 1.5     0.076 to 0.095   1.7, 0.62
# One improbable token dominates the maximum, so with vocabulary ids the maximum does not separate a stale head from
# rounding. The mean separates them with any probe. Float16 is 8 times as precise as bfloat16.
LIMITS = {"float32": Limits(1e-2, 1e-4), "float16": Limits(0.3, 0.02), "bfloat16": Limits(2.0, 0.15)}
"""Limits of a verified push by server dtype.

In bfloat16, a stale head within the mean limit passes (0.09 after noise 0.03) until later pushes increase its error.
"""
REMEMBERED_GROUPS = 4096
PROBE_TOKENS = 64
MAX_ABORTS = 8
"""Maximum number of times that a server may abort one request at one version. A push or a restart aborts it once."""
PUSH_BYTES_PER_SECOND = 100 * 10**6
"""Bytes of a pushed folder that extend a request's time limit by one second: half the rate of a slow network disk."""


class NoServerError(ConfigError):
    """Every server has failed. The message lists the reasons; the run ends."""


class WeightSource(Protocol):
    """Weights to push. All methods are collectives of all ranks."""

    def write(self, transport: Transport, folder: Path, dtype: str | None) -> None:
        """Write a checkpoint, or the LoRA in PEFT's format, from rank 0."""

    def tensors(self, dtype: str | None) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) of a checkpoint; every rank must consume all of them."""

    def score(self, tokens: list[int]) -> list[float]:
        """Return the trainer's logprobs of tokens 1 to L − 1 at temperature 1, on every rank."""


@dataclass
class RemoteStats:
    """Counts and times of this rank since the engine was created.

    Attributes:
        busy_seconds: seconds with at least one request in flight, up to the last idle moment.
        busy_since: start of the current busy period; None when idle.
        retried: requests sent again to another server.
        resumed: answers continued after an interruption.
        lost: how often a server left the fleet.
        returned: how often a server came back between two pushes.
    """

    busy_seconds: float = 0.0
    busy_since: float | None = None
    retried: int = 0
    resumed: int = 0
    lost: int = 0
    returned: int = 0

    @property
    def seconds(self) -> float:
        """Seconds with at least one request in flight."""
        return self.busy_seconds + (0.0 if self.busy_since is None else time.perf_counter() - self.busy_since)


@dataclass
class RemoteEngine:
    """A fleet of inference servers. `connect` creates it; push weights before the first request.

    All requests of a group go to one server, which computes their prompt once; a new group goes to the least loaded
    server. A failed server leaves the fleet, and its requests go to other servers. It returns after a verified push.
    If all servers fail, a server also returns if it still has the weights of the last push.

    Attributes:
        servers: members, including failed ones.
        config: pushes and time-outs.
        transport: how weights reach the servers.
        folder: folder of pushes, unless they are broadcast.
        vocab_size: vocabulary size of the model.
        eos_token_ids: token ids that end an answer.
        probe: text, for example the run's prompts. The logprobs of its first `PROBE_TOKENS` tokens verify a push. An
            empty probe uses ids over the whole vocabulary, which are improbable and have the largest rounding errors.
        recorded_model: record the routed experts of this model for each token; None: do not record.
        seed: seeds requests without a seed.
        version: version of the last push.
        log: called with each message for the user.
        stats: counts and times of this rank.
        push_metrics: metrics of the last push.
        connect_server: connects a server that joins the fleet; None: no server may join.
        colocated: the servers share the trainer's GPU: they sleep while the trainer computes.
        recovery_timeout: seconds to wait for a server if all have failed, because a launcher may restart one.
        close: removes the private folder of pushes.
    """

    servers: list[RemoteServer]
    config: PushConfig
    transport: Transport
    folder: Path
    vocab_size: int
    eos_token_ids: Sequence[int] = ()
    probe: Sequence[int] = ()
    recorded_model: BaseModelArgs | None = None
    seed: int = 0
    version: int = 0
    log: Callable[[str], None] = print
    stats: RemoteStats = field(default_factory=RemoteStats)
    push_metrics: dict[str, float] = field(default_factory=dict)
    connect_server: Callable[[str], RemoteServer] | None = None
    colocated: bool = False
    recovery_timeout: float = 0.0
    close: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        if self.recorded_model is not None:
            routed_experts_sizes(self.recorded_model)  # raises for a model without experts
        self._world = ControlPlane.with_long_timeout("pushes")
        self._groups: OrderedDict[object, RemoteServer] = OrderedDict()
        self._aborted: set[str] = set()
        self._running: dict[str, RemoteServer] = {}
        self._submitted = self._in_flight = 0
        self._pushing = threading.Lock()
        self._last_push: Push | None = None
        self._tried_again: int | None = None  # version of the last attempt to restore servers after all failed
        self._counted, self._lost, self._returned = Counter[str](), Counter[str](), Counter[str]()
        self._joining: list[str] = []
        self._leaving: set[str] = set()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self.max_seq_len = min(server.dialect.facts.max_seq_len for server in self.servers)
        length = min(PROBE_TOKENS, self.max_seq_len - 1)
        # A single token has no logprob.
        self.probe = list(self.probe[:length]) if len(self.probe) > 1 else spaced_token_ids(self.vocab_size, length)

    def get_version(self) -> int:
        """Return the version of the last push."""
        return self.version

    @property
    def fleet(self) -> list[RemoteServer]:
        """Servers that accept requests. Raises NoServerError if there are none."""
        able = [server for server in self.servers if server.failure is None]
        if not able:
            reasons = "; ".join(str(server.failure) for server in self.servers)
            raise NoServerError(f"all inference servers failed: {reasons}")
        return able

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Return the answer to a request. Canceling the caller ends the request on its server."""
        started, response = time.perf_counter(), ModelResponse(list(req.input_ids))
        sampling, aborts = self._sampling(req), Counter[tuple[str, int]]()
        if not self._in_flight:
            self.stats.busy_since = started
        self._in_flight += 1
        try:
            while True:
                await self._resumed.wait()
                answer = await self._ask(sampling, req, aborts)
                response.output_tokens += answer.tokens
                response.output_logprobs += answer.logprobs
                for name, start, end in answer.versions:
                    response.output_versions += [int(name)] * (end - start)
                response.routed_experts = join_records(response.routed_experts, answer.experts)
                response.stop_reason = answer.stop_reason
                done = len(response.output_tokens)
                if answer.stop_reason != "abort" or req.rid in self._aborted:
                    break
                # A push interrupted the answer: continue after its tokens with a new random stream.
                self.stats.resumed += 1
                sampling = self._sampling(req, response.output_tokens, derive_seed(sampling.seed, done))
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self.stats.busy_seconds, self.stats.busy_since = self.stats.seconds, None
            self._aborted.discard(req.rid)
        if req.on_token is not None:
            for token, logprob in zip(response.output_tokens, response.output_logprobs, strict=True):
                req.on_token(token, logprob)
        response.latency = response.ttft = time.perf_counter() - started
        return response

    def prompt_logprobs(self, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Return the logprobs of tokens 1 to L − 1 of `ids`.

        Raises:
            RolloutError: `temperature` is not 1, the only temperature at which servers score.
        """
        if temperature != 1:
            raise RolloutError(f"prompt_logprobs: servers score at temperature 1 only, got {temperature}")
        ids = integer_ids(ids)
        while True:
            server = min(self.fleet, key=lambda server: server.running)
            try:
                scores = server.dialect.score(server.http, server.model, ids, self.config.answer_seconds)
                server.require_version()
                return scores
            except ServerError as error:
                self._lose(server, error)

    def pause(self) -> None:
        """Stop sampling, keep unfinished answers, and hold new requests."""
        self._resumed.clear()
        for server in self.fleet:
            self._keep_or_lose(server, partial(server.dialect.pause, server.http, abort=False))

    def resume(self) -> None:
        """Continue sampling."""
        for server in self.fleet:
            self._keep_or_lose(server, partial(server.dialect.resume, server.http))
        self._resumed.set()

    def sleep(self) -> None:
        """Let every server free its GPU for the trainer, until a push or `wake`.

        Requests wait, and unfinished answers continue afterwards. A server that cannot sleep leaves the fleet.
        """
        for server in self.servers:
            if server.failure is None:
                self._keep_or_lose(server, partial(server.sleep, self.config.seconds))

    def wake(self) -> None:
        """Wake the servers without a push; they have the weights of the last push."""
        release_device_memory()
        for server in self.servers:
            self._keep_or_lose(server, partial(server.wake, self.config.seconds))

    def _keep_or_lose(self, server: RemoteServer, send: Callable[[], None]) -> None:
        """Send a request to a server, which leaves the fleet if it fails."""
        try:
            send()
        except RolloutError as error:
            self._lose(server, error)

    def _lose(self, server: RemoteServer, error: RolloutError) -> None:
        """Take a server out of the fleet."""
        if server.failure is None:
            server.failure = str(error)
            self._mark_lost(server)
            self.log(f"a server leaves the fleet: {error}")

    def abort(self, rid: str | None = None) -> int:
        """End the unfinished requests with id `rid`, or all, with stop reason `abort`. Return their number."""
        chosen = {key: server for key, server in self._running.items() if rid is None or _request_id(key) == rid}
        self._aborted |= {_request_id(key) for key in chosen}
        for key, server in chosen.items():
            self._keep_or_lose(server, partial(server.dialect.abort, server.http, key))
        return len(chosen)

    def update_weights(self, meta: WeightSource, *, version: int | None = None) -> None:
        """Push weights to every server, including failed ones, and verify each push; a collective.

        A server with a failed push leaves the fleet until a later push succeeds.

        Raises:
            NoServerError: all pushes failed.
        """
        with self._pushing:
            self._sync_members()
            version = self.version + 1 if version is None else version
            started, is_main = time.perf_counter(), self._world.is_main
            failures = {server.url: server.failure for server in self.servers}
            dtypes = {server.dialect.facts.dtype for server in self.servers}
            dtype = dtypes.pop() if len(dtypes) == 1 else None
            is_broadcast = self.transport in BROADCAST_TRANSPORTS
            # 1. Write a folder, unless the weights are broadcast.
            push = Push(self.transport, version, list(self.probe), Future(), LIMITS["float32"], self.config.seconds)
            size = 0
            if not is_broadcast:
                folder = self.folder / f"version-{version}"
                meta.write(self.transport, folder, dtype)
                delta, since = self._write_delta(folder)
                push = replace(push, folder=folder, delta=delta, since=since)
                size = _size(folder) if is_main else 0
                push = replace(push, seconds=push.seconds + size / PUSH_BYTES_PER_SECOND)
                size = _size(delta) if is_main and delta is not None else size
            seconds = time.perf_counter() - started
            if any(server.asleep for server in self.servers):
                release_device_memory()
            # 2. Rank 0 pushes to all servers, each in a thread. Meanwhile all ranks gather buckets and score the probe.
            queues = [BucketQueue() if is_broadcast else None for _ in self.servers]
            with ThreadPoolExecutor(len(self.servers)) as pool:
                pushed = [
                    pool.submit(server.push, replace(push, limits=self._limits(server), buckets=queue))
                    for server, queue in zip(self.servers if is_main else [], queues, strict=is_main)
                ]
                try:
                    if is_broadcast:
                        size = self._gather(meta.tensors(dtype), [queue for queue in queues if queue is not None])
                        seconds = time.perf_counter() - started
                    push.expected.set_result(meta.score(push.probe))
                except BaseException as error:
                    push.expected.set_exception(error)  # the servers' threads wait for it
                    raise
                self._last_push = push
                results = self._world.broadcast_json(lambda: list(map(_outcome, self.servers, pushed)))
            # 3. Update the fleet and the metrics on all ranks.
            differences = self._accept(results, failures, version)
            self.version = version
            self.push_metrics = {
                "push/difference": max(differences, default=float("nan")),
                "push/bytes": float(size),
                "push/write_seconds": seconds,
                "push/seconds": time.perf_counter() - started,
                "push/servers": float(len(differences)),
                **self._counts(),
            }
            if push.folder is not None and is_main:
                for folder in self.folder.glob("version-*"):
                    if folder != push.folder:
                        shutil.rmtree(folder, ignore_errors=True)
        if self.recovery_timeout and not any(server.failure is None for server in self.servers):
            self._wait_for_one()
        _ = self.fleet  # raises where all failed

    def restore_server(self, server: RemoteServer) -> bool:
        """Repeat the last push to a failed server and verify it.

        Any thread of rank 0 may call it. Other ranks learn about it at the next push.

        Returns:
            False if there is no push to repeat or the server has not failed.

        Raises:
            RolloutError: the push failed; the server stays out of the fleet.
        """
        with self._pushing:
            push = self._last_push
            if push is None or push.folder is None or server not in self.servers or server.failure is None:
                return False
            server.push(replace(push, delta=None, since=None, limits=self._limits(server)))
        self._restore_lost(server)
        return True

    def join(self, url: str) -> None:
        """Add a server to the fleet at the next push. Any thread of rank 0 may call it."""
        self._joining.append(url.rstrip("/"))

    def leave(self, url: str) -> None:
        """Remove a server from the fleet: at once on rank 0, at the next push on other ranks."""
        self._leaving.add(url.rstrip("/"))
        for server in self.servers:
            if server.url in self._leaving and server.failure is None:
                server.failure = f"{server.url} was removed from the fleet"

    def _gather(self, tensors: Iterator[tuple[str, Tensor]], queues: Sequence[BucketQueue]) -> int:
        """Gather all tensors, and broadcast them on rank 0 through the servers' queues. Return their bytes there."""
        if not self._world.is_main:
            for _ in tensors:  # gathering is a collective
                pass
            return 0
        size, end = 0, None
        try:
            for bucket in pack(tensors, stream_device(self.transport)):
                size += bucket.data.numel()
                for queue in queues:
                    queue.put(bucket)
        except BaseException as error:
            end = error if isinstance(error, Exception) else ServerError(f"the push was interrupted: {error!r}")
            raise
        finally:
            for queue in queues:
                queue.put(end)
        return size

    def _accept(
        self, results: Sequence[tuple[str, float, str | None]], failures: Mapping[str, str | None], version: int
    ) -> list[float]:
        """Apply the (model, difference, failure) of each server's push. Return the differences of verified pushes."""
        differences = []
        for server, (model, difference, failure) in zip(self.servers, results, strict=True):
            server.failure = failure
            if failure is None:
                server.accept(model, version)
                differences.append(difference)
            elif failures[server.url] is None:
                self._mark_lost(server)
                self.log(f"push of version {version} failed, the server leaves the fleet: {failure}")
            elif failures[server.url] != failure:
                self.log(f"push of version {version} failed, the server stays out of the fleet: {failure}")
        return differences

    def _mark_lost(self, server: RemoteServer) -> None:
        self.stats.lost += 1
        self._lost[server.url] += 1

    def _restore_lost(self, server: RemoteServer) -> None:
        self.stats.returned += 1
        self._returned[server.url] += 1

    def _retry_lost_servers(self) -> None:
        """Restore servers that still have the weights of the last push, at most once per push.

        If all servers fail at once, the cause may be this process, suspended for longer than the time-out of an answer,
        or its network.
        """
        with self._pushing:
            push = self._last_push
            if push is None or push.version == self._tried_again or any(s.failure is None for s in self.servers):
                return
            self._tried_again = push.version
            for server in self.servers:
                if server.url in self._leaving or server.version != push.version:
                    continue
                try:
                    server.verify(replace(push, limits=self._limits(server)))
                except RolloutError:
                    continue  # the first failure is more informative
                server.failure = None
                self._restore_lost(server)
                self.log(f"{server.url} is back: it still has the weights of version {push.version}")

    def _counts(self) -> dict[str, float]:
        """Return event counts of all ranks since the previous push.

        A server that several ranks lost or restored counts once.
        """
        stats = self.stats
        totals = Counter(retried=stats.retried, resumed=stats.resumed)
        totals.update({f"{server.url}/answers": server.answers for server in self.servers})
        events = json.dumps([totals - self._counted, self._lost, self._returned]).encode()
        self._counted, self._lost, self._returned = totals, Counter(), Counter()
        counts, lost, returned = zip(*map(json.loads, self._world.all_gather(events)), strict=True)

        def total(name: str) -> float:
            return float(sum(rank_counts.get(name, 0) for rank_counts in counts))

        def distinct(rank_counts: Sequence[dict[str, int]]) -> float:
            return float(reduce(or_, map(Counter, rank_counts), Counter[str]()).total())

        return {
            "servers/retried": total("retried"),
            "servers/resumed": total("resumed"),
            "servers/lost": distinct(lost),
            "servers/returned": distinct(returned),
            **{f"servers/{i}/answers": total(f"{server.url}/answers") for i, server in enumerate(self.servers)},
        }

    def _sync_members(self) -> None:
        """Apply joins and leaves of rank 0 on every rank."""
        joining, self._joining = self._joining, []
        urls, joining, leaving = self._world.broadcast_json(
            lambda: ([server.url for server in self.servers], joining, sorted(self._leaving))
        )
        self._update_urls(urls)
        # Every rank connects, and a server joins if it accepts all of them.
        connected = {url: server for url in joining if (server := self._connect(url)) is not None}
        accepting = self._world.all_gather(json.dumps(list(connected)).encode())
        able = set(joining).intersection(*map(json.loads, accepting))
        for url, joined in connected.items():
            if url in able and all(server.url != url for server in self.servers):
                joined.failure = f"{url} has joined and waits for its first push"
                self.servers.append(joined)
                self._leaving.discard(url)
        staying = [server for server in self.servers if server.url not in leaving or server.url in able]
        if staying:
            self.servers[:] = staying

    def _update_urls(self, urls: Sequence[str]) -> None:
        """Switch to the URLs of servers that rank 0 has restarted elsewhere."""
        if self._world.is_main:
            return  # the launcher has updated these servers, and may have done so again
        for server, url in zip(self.servers, urls, strict=True):
            if server.url != url:
                server.move(url)

    def _connect(self, url: str) -> RemoteServer | None:
        """Return a server that joins; None if it cannot be used."""
        try:
            return None if self.connect_server is None else self.connect_server(url)
        except UserError as error:
            self.log(f"{url} cannot join: {error}")
            return None

    def _wait_for_one(self) -> None:
        """Wait on every rank until a server is back, at most `recovery_timeout` seconds."""

        def states() -> list[tuple[str, str, int | None, str | None]]:
            until = time.monotonic() + self.recovery_timeout
            while time.monotonic() < until and all(server.failure is not None for server in self.servers):
                time.sleep(POLL_SECONDS)
            return [(server.url, server.model, server.version, server.failure) for server in self.servers]

        synced = self._world.broadcast_json(states)
        self._update_urls([url for url, *_ in synced])
        for server, (_, model, version, failure) in zip(self.servers, synced, strict=True):
            if failure is None and version is not None:
                server.accept(model, version)

    def state_dict(self) -> dict[str, int]:
        """Return the state that seeds the requests of a resumed run."""
        return {"version": self.version, "submitted": self._submitted}

    def _write_delta(self, folder: Path) -> tuple[Path | None, int | None]:
        """Return the folder of the delta and its base version, or (None, None) for a full push."""
        old, delta = self.folder / f"version-{self.version}", folder.with_name(f"{folder.name}-delta")
        if self.transport != "delta" or not self._world.is_main or old == folder:
            return None, None
        return (delta, self.version) if write_delta(old, folder, delta) else (None, None)

    def _limits(self, server: RemoteServer) -> Limits:
        """Return the configured limit, or the limits of the server's dtype."""
        if self.config.max_difference is not None:
            return Limits(self.config.max_difference, self.config.max_difference)
        return LIMITS.get(server.dialect.facts.dtype, LIMITS["float32"])

    async def _ask(self, sampling: Sampling, req: ModelRequest, aborts: Counter[tuple[str, int]]) -> Answer:
        """Return the answer of the group's server, or of another server if it fails.

        Args:
            sampling: the request for the rest of the answer.
            req: the whole request.
            aborts: how often each server has aborted it with the weights of each version.

        Raises:
            RefusedError: every server refuses the request.
        """
        refusals: dict[str, RefusedError] = {}
        while True:
            server = await self._choose(req.metadata.get("group"), refusals)
            key = f"{sampling.rid}.{self._submitted}"
            self._submitted += 1
            self._running[key] = server
            try:
                named = replace(sampling, rid=key, model=server.model)
                seconds, expert_bytes = self.config.answer_seconds, self._expert_bytes()
                answer = await server.generate(named, seconds, self.vocab_size, expert_bytes)
                answer.experts = self._experts(answer, server, len(sampling.prompt))
                if answer.stop_reason == "abort" and req.rid not in self._aborted:
                    aborts[server.url, self.version] += 1
                    if (count := aborts[server.url, self.version]) > MAX_ABORTS:
                        raise ServerError(
                            f"{server.url} ended a request {count} times with abort, without a push; expected at most "
                            f"{MAX_ABORTS} times"
                        )
            except ServerError as error:
                self._lose(server, error)
                self.stats.retried += 1
            except RefusedError as error:
                refusals[server.url] = error
                self.stats.retried += 1
            else:
                for other in self.servers:
                    if other.url in refusals:  # this server takes what the other refused
                        self._lose(other, refusals[other.url])
                return answer
            finally:
                del self._running[key]

    def _expert_bytes(self) -> int:
        """Return the bytes of one token's routed experts in a response, at most: base64 of int64."""
        if self.recorded_model is None:
            return 0
        _, top_k, _ = routed_experts_sizes(self.recorded_model)
        return self.recorded_model.n_layers * top_k * 8 * 4 // 3

    def _experts(self, answer: Answer, server: RemoteServer, prompt: int) -> Experts | None:
        """Return the routed experts of prompt and answer, or None if they are not recorded.

        Raises ServerError if the server does not report them for every token.
        """
        if self.recorded_model is None or not answer.tokens:
            return None
        if answer.experts is None:
            is_vllm = server.dialect.facts.kind == "vllm"
            fix = "start it with --enable-return-routed-experts" if is_vllm else "use vLLM"
            raise ServerError(
                f"{server.url} does not report routed experts, but generator.record_experts is set; {fix}, or unset "
                "generator.record_experts"
            )
        n = prompt + len(answer.tokens)
        if len(answer.experts) > n:
            raise ServerError(f"{server.url} sent routed experts of {len(answer.experts)} tokens; expected at most {n}")
        try:
            return decode_server_experts(answer.experts, self.recorded_model, n - 1)
        except RolloutError as error:
            raise ServerError(f"{server.url}: {error}") from None

    async def _choose(self, group: object, refusals: Mapping[str, RefusedError]) -> RemoteServer:
        """Return the group's server or the least loaded one; skip servers that receive weights or sleep.

        Raises RefusedError if all servers of the fleet are in `refusals`.
        """
        until = time.monotonic() + self.recovery_timeout
        while True:
            if all(server.failure is not None for server in self.servers):
                if time.monotonic() < until:
                    await asyncio.sleep(POLL_SECONDS)
                    continue
                await asyncio.to_thread(self._retry_lost_servers)
            asked = [server for server in self.fleet if server.url not in refusals]
            if not asked:
                raise next(iter(refusals.values()))
            ready = [server for server in asked if not (server.pushing or server.asleep)]
            if ready:
                break
            await asyncio.sleep(POLL_SECONDS)
        server = self._groups.get(group)
        if group is None or server not in ready:
            server = min(ready, key=lambda server: server.running)
        if group is not None:
            self._groups[group] = server
            self._groups.move_to_end(group)
            if len(self._groups) > REMEMBERED_GROUPS:
                self._groups.popitem(last=False)
        return server

    def _sampling(self, req: ModelRequest, first_tokens: Sequence[int] = (), seed: int | None = None) -> Sampling:
        """Return the request for the rest of the answer after `first_tokens`.

        Raises RolloutError for an invalid request, and ConfigError for sampling values that a server does not support.
        """
        g = req.gconfig
        limit = max_answer_tokens(req, self.vocab_size, self.max_seq_len, "the servers' --max-model-len")
        if req.image_data:
            raise RolloutError(f"request {req.rid} has image_data, but servers accept only tokens")
        if req.constraint is not None:
            raise RolloutError(
                f"request {req.rid} constrains its answer, for example to JSON, which needs the in-process generator; "
                "remove the constraint for rollouts on servers"
            )
        if g.changes_logits or g.top_logprobs:
            raise RolloutError(
                f"request {req.rid}: min_p, penalties, logit_bias and top_logprobs need the in-process generator; "
                "remove them for rollouts on servers"
            )
        for server in self.servers:
            server.dialect.check(g)
        if seed is None:  # servers accept 63 bits
            seed = request_seed(self.seed, self._submitted) >> 1 if g.seed is None else g.seed
        if first_tokens and g.min_new_tokens:
            g = g.new(min_new_tokens=max(0, g.min_new_tokens - len(first_tokens)))
        return Sampling(
            prompt=[*req.input_ids, *first_tokens],
            gconfig=g,
            limit=limit - len(first_tokens),
            stop_token_ids=stop_ids(g, self.eos_token_ids, self.vocab_size),
            seed=seed,
            rid=req.rid,
            model="",
        )


def release_device_memory() -> None:
    """Return the memory that torch's allocator caches to the GPU, where servers of other processes need it."""
    gc.collect()
    torch.cuda.empty_cache()


def spaced_token_ids(vocab_size: int, n: int) -> list[int]:
    """Return up to `n` distinct token ids, evenly spaced over the vocabulary, in a mixed order."""
    step = max(1, vocab_size // n)
    ids = list(range(0, vocab_size, step))[:n]
    return [*ids[::2], *ids[1::2][::-1]]


def _outcome(server: RemoteServer, push: Future[float]) -> tuple[str, float, str | None]:
    """Wait for a push. Return the server's model name, the largest |Δ logprob|, and the failure or None."""
    try:
        difference = push.result()
    except RolloutError as error:
        return server.model, 0.0, str(error)
    return server.model, difference, None


def _request_id(key: str) -> str:
    return key.rpartition(".")[0]


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
