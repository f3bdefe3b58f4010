"""Pool of killable reward processes: a thread sends calls, enforces time-outs and replaces workers.

`concurrent.futures.ProcessPoolExecutor` cannot kill a hung call, one dead process breaks all its calls, and interpreter
exit waits for it. `pebble.ProcessPool` 5.2.3 leaks child processes of a killed reward, runs canceled queued calls, and
imports the user's script (and torch) in each worker, like every pool on `multiprocessing`. With 2 workers on 2 cores it
ran 6,200 calls/s (here 12,700), with the first result after 0.64 s (0.17 s).

A worker is a fresh interpreter without the parent's threads, locks or CUDA context; it imports only the reward's
module. It answers calls in order, so the oldest unanswered call is the executing one: its time-out runs, and it fails
if the process dies, while later calls move to another worker. Sending cheap calls ahead doubles the calls per second.

A worker runs the user's code, so its replies and its output are bounded and checked: a reply that does not fit costs
the executing call and the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from archon.rl.rewards.result import Reward, RewardCrashed, RewardFailure, RewardInvalid, RewardRaised, RewardTimeout
from archon.rl.rewards.worker import LENGTH, MAX_REPLY_BYTES
from archon.schema.children import start_child
from archon.schema.errors import RewardError

Item = TypeVar("Item")
Outcome = Reward | RewardError

START_SECONDS = 120.0  # limit for importing the reward's module; time-outs of calls start later
_MAX_FAILED_STARTS = 3  # consecutive failures before the reward counts as broken
_AHEAD_SECONDS, _AHEAD_CALLS = 0.004, 32  # maximum work sent ahead to a worker, to save round trips
_READ_BYTES = 1 << 16
MAX_OUTPUT_BYTES = 1 << 16  # printed by one call; the rest is dropped, so that it does not fill the disk of a log
_PIPE_BYTES = 1 << 16
MAX_CALL_BYTES = 1 << 30  # of a call's pickled arguments
_MAX_WAIT_SECONDS = 86_400.0  # epoll's limit is some weeks
_REPLY_FIELDS: dict[Any, dict[str, type]] = {
    "ready": {},
    "load_failed": {"text": str},
    "reward": {"seconds": float, "total": float, "parts": dict},
    "invalid": {"seconds": float, "text": str},
    "raised": {"seconds": float, "error": str, "text": str},
}
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # no SIGPIPE when writing to a dead worker
_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[3:]; from archon.rl.rewards.worker import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]))"
)


@dataclass(eq=False)
class RewardCall:
    """Call with pickled arguments and the future of its outcome."""

    frame: bytes
    future: asyncio.Future[Outcome]


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    channel: socket.socket
    output: int  # descriptor of what it prints
    deadline: float  # monotonic seconds; infinite when idle
    ready: bool = False
    calls: deque[RewardCall] = field(default_factory=deque)  # sent and not answered; the first one executes
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    output_left: int = MAX_OUTPUT_BYTES  # bytes that the executing call may still print


class WorkerPool:
    """Pool that runs one function in at most `max_workers` processes, started on demand.

    Args:
        setup: the pickled function, see `setup_frame`.
        name: name of the function, for messages.
        timeout_seconds: time limit of one call.
        max_workers: maximum number of processes.
    """

    def __init__(self, setup: bytes, name: str, timeout_seconds: float, max_workers: int) -> None:
        self.name = name
        self.timeout_seconds = timeout_seconds
        self.max_workers = max_workers
        self._setup = setup
        self._owner = os.getpid()
        # Both are shared with other threads; a deque's operations are atomic.
        self._inbox: deque[RewardCall] = deque()
        self._done: deque[tuple[RewardCall, Outcome]] = deque()
        self._queue: deque[RewardCall] = deque()
        self._workers: list[_Worker] = []
        self._dying: list[subprocess.Popen[bytes]] = []
        self._failed_starts = 0
        self._broken: tuple[str, str] | None = None  # message and traceback, once no worker can start
        self._seconds_per_call: float | None = None
        self._closing = False
        self._wake_pending = False
        self._selector = selectors.DefaultSelector()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"rewards of {name}", daemon=True)
        self._thread.start()

    async def run(self, frame: bytes) -> Outcome:
        """Run one call with pickled arguments and return its outcome."""
        call = RewardCall(frame, asyncio.get_running_loop().create_future())
        self.submit(call)
        return await call.future

    def submit(self, call: RewardCall) -> None:
        """Queue a call from any thread; its outcome is delivered exactly once, also if the pool closes."""
        if os.getpid() != self._owner:
            raise RewardError(f"the wrapper of reward {self.name} belongs to another process; create one in this one")
        self._inbox.append(call)
        self._wake()
        if self._closing:
            self._fail(self._inbox)
            self._flush()

    def close(self) -> None:
        """Kill the workers and fail unanswered calls, from any thread, without waiting for a reward."""
        if os.getpid() != self._owner:
            return  # a forked child leaves its parent's workers alone
        self._closing = True
        self._wake_pending = False
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)

    def _wake(self) -> None:
        if self._wake_pending:
            return
        self._wake_pending = True
        try:
            self._wake_sender.send(b"\0")
        except BlockingIOError:
            return  # the thread has wake-ups to read
        except OSError:
            self._wake_pending = False  # closed

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, events in self._selector.select(self._wait_seconds()):
                    if key.data is None:
                        self._wake_receiver.recv(4096)
                        self._wake_pending = False
                        continue
                    worker = key.data
                    if worker in self._workers and key.fd == worker.output:
                        self._forward_output(worker)
                        continue
                    if worker in self._workers and events & selectors.EVENT_WRITE:
                        self._send(worker)
                    if worker in self._workers and events & selectors.EVENT_READ:
                        self._receive(worker)
                self._queue.extend(_drain(self._inbox))
                self._dying = [process for process in self._dying if process.poll() is None]
                self._expire()
                self._dispatch()
                self._flush()
        finally:
            self._shut_down()

    def _wait_seconds(self) -> float | None:
        if self._inbox:
            return 0.0
        nearest = min((worker.deadline for worker in self._workers), default=float("inf"))
        if self._dying:
            nearest = min(nearest, time.monotonic() + 1.0)
        return None if nearest == float("inf") else min(max(0.0, nearest - time.monotonic()), _MAX_WAIT_SECONDS)

    def _receive(self, worker: _Worker) -> None:
        try:
            chunk = worker.channel.recv(_READ_BYTES)
        except ConnectionError:
            chunk = b""  # it died; its earlier answers have been received
        if not chunk:
            self._worker_died(worker)
            return
        received = worker.received
        received += chunk
        start = 0
        while len(received) - start >= LENGTH.size:
            size = LENGTH.unpack_from(received, start)[0]
            end = start + LENGTH.size + size
            if len(received) < end and size <= MAX_REPLY_BYTES:
                break
            reply = _parse_reply(received[start + LENGTH.size : end]) if size <= MAX_REPLY_BYTES else None
            if reply is None or not self._expects(worker, reply["event"]):
                failure = f"the process of reward function {self.name} sent an invalid reply and was killed"
                self._remove(worker, RewardCrashed(failure))
                if not worker.ready:
                    self._start_failed("its first reply is invalid")
                return
            self._take_reply(worker, reply)
            start = end
        del received[:start]

    @staticmethod
    def _expects(worker: _Worker, event: str) -> bool:
        return bool(worker.calls) if worker.ready else event in ("ready", "load_failed")

    def _forward_output(self, worker: _Worker) -> bool:
        """Write output of a worker to standard error, up to its limit; return whether there may be more."""
        try:
            chunk = os.read(worker.output, _READ_BYTES)
        except BlockingIOError:
            return False
        if not chunk:  # all processes with the other end have closed it
            self._selector.unregister(worker.output)
            return False
        shown = chunk[: worker.output_left]
        if worker.output_left and len(chunk) >= worker.output_left:
            notice = f"archon: reward function {self.name} printed more than {MAX_OUTPUT_BYTES:,} bytes in one call"
            shown += f"\n{notice}; the rest is dropped\n".encode()
        worker.output_left = max(0, worker.output_left - len(chunk))
        with contextlib.suppress(OSError):  # standard error is closed, or its disk is full
            while shown:
                shown = shown[os.write(2, shown) :]
        return True

    def _take_reply(self, worker: _Worker, reply: dict[str, Any]) -> None:
        event = reply["event"]
        worker.output_left = MAX_OUTPUT_BYTES
        if event == "ready":
            worker.ready = True
            worker.deadline = float("inf")
            self._failed_starts = 0
            return
        if event == "load_failed":
            cause = reply["text"].strip().splitlines()[-1]
            self._broken = f"a worker process cannot load the reward function {self.name}: {cause}", reply["text"]
            return
        call = worker.calls.popleft()
        seconds = reply["seconds"]
        average = self._seconds_per_call
        self._seconds_per_call = seconds if average is None else 0.9 * average + 0.1 * seconds
        worker.deadline = time.monotonic() + self.timeout_seconds if worker.calls else float("inf")
        if event == "reward":
            outcome: Outcome = Reward(reply["total"], reply["parts"])
        elif event == "invalid":
            outcome = RewardInvalid(reply["text"])
        else:
            outcome = RewardRaised(f"reward function {self.name} raised {reply['error']}", reply["text"])
        self._done.append((call, outcome))

    def _expire(self) -> None:
        now = time.monotonic()
        for worker in [worker for worker in self._workers if worker.deadline <= now]:
            if worker.ready:
                message = f"reward function {self.name} ran longer than {self.timeout_seconds:g} s and was killed"
                self._remove(worker, RewardTimeout(message))
            else:
                self._remove(worker, None)
                self._start_failed(f"not loaded after {START_SECONDS:g} s")

    def _worker_died(self, worker: _Worker) -> None:
        """Handle a worker that closed its end of the socket, and report its exit code."""
        _kill(worker.process)
        reason = _describe_exit(worker.process)
        if worker.ready:
            self._remove(worker, RewardCrashed(f"the process of reward function {self.name} {reason}"))
        else:
            self._remove(worker, None)
            self._start_failed(f"the process {reason}")

    def _start_failed(self, reason: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= _MAX_FAILED_STARTS and self._broken is None:
            message = f"no worker process for the reward function {self.name} could start {_MAX_FAILED_STARTS} times"
            self._broken = f"{message}: {reason}", ""

    def _remove(self, worker: _Worker, failure: RewardFailure | None) -> None:
        """Kill a worker and its children; the executing call fails, later calls return to the queue's head."""
        self._workers.remove(worker)
        self._selector.unregister(worker.channel)
        worker.channel.close()
        if worker.process.poll() is None:
            _kill(worker.process)
            self._dying.append(worker.process)
        # The last output of a crash, at most what a pipe holds: other processes may go on writing.
        for _ in range(_PIPE_BYTES // _READ_BYTES):
            if worker.output not in self._selector.get_map() or not self._forward_output(worker):
                break
        with contextlib.suppress(KeyError):
            self._selector.unregister(worker.output)
        os.close(worker.output)
        if failure is not None and worker.calls:
            self._done.append((worker.calls.popleft(), failure))
        self._queue.extendleft(reversed(worker.calls))

    def _dispatch(self) -> None:
        if self._broken is not None:
            message, text = self._broken
            for call in _drain(self._queue):
                error = RewardError(message)
                error.add_note(text)
                self._done.append((call, error))
            return
        ready = [worker for worker in self._workers if worker.ready]
        seconds = self._seconds_per_call
        depth = max(1, min(_AHEAD_CALLS, int(_AHEAD_SECONDS / seconds))) if seconds else 1
        used = set()
        while self._queue and ready:
            worker = min(ready, key=lambda candidate: len(candidate.calls))
            if len(worker.calls) >= depth:
                break
            call = self._queue.popleft()
            if call.future.cancelled():
                continue  # its caller was canceled
            if not worker.calls:
                worker.deadline = time.monotonic() + self.timeout_seconds
            worker.calls.append(call)
            worker.unsent += LENGTH.pack(len(call.frame)) + call.frame
            used.add(worker)
        for worker in used:
            self._send(worker)
        starting = sum(not worker.ready for worker in self._workers)
        while len(self._workers) < self.max_workers and starting < len(self._queue) and self._broken is None:
            starting += 1
            self._start()

    def _send(self, worker: _Worker) -> None:
        try:
            sent = worker.channel.send(worker.unsent, _NO_SIGNAL)
        except BlockingIOError:
            sent = 0
        except ConnectionError:
            sent = len(worker.unsent)  # it died; its last answers are read before it is removed
        del worker.unsent[:sent]
        writing = selectors.EVENT_WRITE if worker.unsent else 0
        self._selector.modify(worker.channel, selectors.EVENT_READ | writing, worker)

    def _start(self) -> None:
        """Start a worker on the pool's thread: Linux kills a worker when its parent thread ends."""
        with contextlib.ExitStack() as worker_ends, contextlib.ExitStack() as own_ends:
            try:
                channel, worker_end = socket.socketpair()
                own_ends.callback(channel.close)
                worker_ends.callback(worker_end.close)
                output, printed = os.pipe()
                own_ends.callback(os.close, output)
                worker_ends.callback(os.close, printed)
                process = start_child(
                    [sys.executable, "-c", _BOOTSTRAP, str(worker_end.fileno()), str(self._owner), *sys.path],
                    stdin=subprocess.DEVNULL,
                    stdout=printed,  # a reward prints to standard error
                    stderr=printed,
                    pass_fds=(worker_end.fileno(),),
                    start_new_session=True,  # Ctrl-C reaches only the trainer, and a kill includes children
                )
            except OSError as error:
                self._start_failed(str(error))
                return
            own_ends.pop_all()
        channel.setblocking(False)
        os.set_blocking(output, False)
        worker = _Worker(process, channel, output, deadline=time.monotonic() + START_SECONDS)
        worker.unsent += LENGTH.pack(len(self._setup)) + self._setup
        self._workers.append(worker)
        self._selector.register(channel, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)
        self._selector.register(output, selectors.EVENT_READ, worker)

    def _shut_down(self) -> None:
        self._closing = True
        for worker in list(self._workers):
            self._queue.extendleft(reversed(worker.calls))
            worker.calls.clear()
            self._remove(worker, None)
        for process in self._dying:
            with contextlib.suppress(subprocess.TimeoutExpired):  # killed, but stuck in the kernel
                process.wait(timeout=5)
        self._fail(self._queue)
        self._fail(self._inbox)
        self._flush()
        self._selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _flush(self) -> None:
        """Deliver outcomes, with one wake-up per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RewardCall, Outcome]]] = {}
        for call, outcome in _drain(self._done):
            by_loop.setdefault(call.future.get_loop(), []).append((call, outcome))
        for loop, settled in by_loop.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody awaits the outcome
                loop.call_soon_threadsafe(_set_results, settled)

    def _fail(self, calls: deque[RewardCall]) -> None:
        for call in _drain(calls):
            self._done.append((call, RewardError(f"the wrapper of reward {self.name} is closed")))


def _parse_reply(body: bytes | bytearray) -> dict[str, Any] | None:
    """Return a worker's message; None if it is invalid."""
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError):
        return None
    fields = _REPLY_FIELDS.get(reply.get("event")) if isinstance(reply, dict) else None
    if fields is None or any(not isinstance(reply.get(name), kind) for name, kind in fields.items()):
        return None
    numbers = [value for name in ("seconds", "total") if (value := reply.get(name)) is not None]
    numbers += reply.get("parts", {}).values()
    if not all(isinstance(number, float) and math.isfinite(number) for number in numbers):
        return None
    return reply if reply.get("seconds", 0.0) >= 0 else None


def _set_results(settled: list[tuple[RewardCall, Outcome]]) -> None:
    for call, outcome in settled:
        if not call.future.done():
            call.future.set_result(outcome)


def _drain(items: deque[Item]) -> Iterator[Item]:
    """Yield and remove items one by one; safe with concurrent threads."""
    while True:
        try:
            item = items.popleft()
        except IndexError:
            return
        yield item


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a worker's process group; never after wait(), since the id may be reused."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group has ended
        os.killpg(process.pid, signal.SIGKILL)


def _describe_exit(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        return "stopped answering and was killed"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code} in the middle of a call"
