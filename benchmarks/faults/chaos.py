"""Harm to a run, event after event, each with the time that the run may take until it is whole again."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.served import CUT_SECONDS, KINDS, MOMENTS, Served
from benchmarks.faults.slowdown import Slowdown
from benchmarks.faults.trainer import RANKS, Trainer
from benchmarks.harness import BenchmarkError

OF_RANKS = ("rank", "controller", "pause")
ALL_KINDS = (*KINDS, "cut", *OF_RANKS, "disk")
SECONDS = 10.0
"""Time-out of an answer and of a push."""
STOPPED_SECONDS = SECONDS + 2
BEGIN_SECONDS = 600.0
"""Within which a run that nobody harms must have begun."""
LONGEST_WAIT = 0.7
"""Before a rank is harmed: about a step, so that it may be at any point of one."""
TIMES_SLOWER = 3.0
"""Limit of a start or a step, as a multiple of its time without faults on an equally busy machine."""
POLL_SECONDS = 0.1
_HARM = {"stop": STOPPED_SECONDS, "pause": STOPPED_SECONDS, "cut": CUT_SECONDS}
_TIME_OUTS = 2
"""One for the request under way, and one for the next push to a server that is still out."""
_STEPS = 5
"""Steps of an event: the current one, the lost one, one without the server, and two with the whole fleet."""


@dataclass(frozen=True)
class Pace:
    """Seconds on this machine while nothing is harmed: of a run's start until its second step is done, and of a step;
    and wall time over processor time meanwhile."""

    run: float
    step: float
    slowdown: float

    def limit(self, kind: str, slowdown: float, served: float = 0.0) -> float:
        """Return the seconds after which a run counts as hung after an event of this kind.

        The limit adds the duration of the fault, its time-outs, and the repeated work. After a fault of a rank,
        torchrun may fail to restart its ranks and must then itself be restarted. This benchmark starts servers itself,
        so their start time `served` is not charged to the run. `slowdown` is the slowdown of the machine during the
        event.
        """
        starts = 2 * self.run if kind in (*OF_RANKS, "disk") else 0.0
        work = TIMES_SLOWER * (starts + _STEPS * self.step) * max(1.0, slowdown / self.slowdown)
        return _HARM.get(kind, 0.0) + _TIME_OUTS * SECONDS + work + served


@dataclass
class Deadline:
    """When the run must be whole again after an event, as far as it is known by now."""

    kind: str
    pace: Pace
    slowdown: Slowdown
    served: float = 0.0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Returns the seconds since the event."""
        return time.monotonic() - self.started

    @property
    def limit(self) -> float:
        """Return the limits of the events."""
        return self.pace.limit(self.kind, self.slowdown.since(self.started), self.served)

    @property
    def passed(self) -> bool:
        return self.seconds > self.limit


class Chaos:
    """Does harm to a run, event after event, each once the run has overcome the last."""

    def __init__(
        self,
        servers: Sequence[Served],
        trainer: Trainer,
        disk: Path,
        kinds: Sequence[str],
        seed: int,
        slowdown: Slowdown,
    ) -> None:
        self._servers, self._trainer, self._disk, self._kinds = servers, trainer, disk, kinds
        self._random, self._slowdown = random.Random(seed), slowdown

    def begin(self) -> Pace:
        """Return the pace of a run that nobody harms, once it has begun."""
        started = time.monotonic()
        begun = self._until_whole(lambda: time.monotonic() > started + BEGIN_SECONDS)
        whole = self._until_whole(lambda: time.monotonic() > started + BEGIN_SECONDS)
        return Pace(begun - started, (whole - begun) / 2, self._slowdown.since(started))

    def do(self, number: int, pace: Pace) -> dict[str, Any]:
        """Return the event, once it was done and overcome. Raises BenchmarkError where that takes too long."""
        kinds, starts = self._kinds, self._trainer.starts
        # Each kind once before any is drawn.
        kind = kinds[number] if number < len(kinds) else self._random.choice(kinds)
        event: dict[str, Any] = {"event": number, "kind": kind}
        deadline = Deadline(kind, pace, self._slowdown)
        if kind == "disk":
            self._fill_disk(deadline)
        elif kind in OF_RANKS:
            event |= {"rank": self._harm_rank(kind)}
        else:
            event |= self._harm_server(kind, deadline)
        self._until_whole(lambda: deadline.passed)
        event |= {"seconds": round(deadline.seconds, 1), "limit": round(deadline.limit, 1)}
        slower = round(self._slowdown.since(deadline.started) / pace.slowdown, 2)
        return event | {"slowdown": slower, "run_started_again": self._trainer.starts - starts}

    def _until_whole(self, passed: Callable[[], bool]) -> float:
        """Wait for two further steps, with a push to every server in each, and starts a run again that has ended.
        Returns when that was. Raises BenchmarkError where it is too late."""
        before = None
        while not passed():
            self._trainer.keep()
            last = self._trainer.steps()[-2:]
            step = last[-1]["step"] if last else 0
            before = step if before is None else min(before, step)  # a resumed run drops the steps after its checkpoint
            if step >= before + 2 and all(record.get("push/servers") == len(self._servers) for record in last):
                return time.monotonic()
            time.sleep(POLL_SECONDS)
        raise BenchmarkError(f"the run is not whole again in time; it said: {self._trainer.output()[-3000:]}")

    def _harm_server(self, kind: str, deadline: Deadline) -> dict[str, Any]:
        server, moment = self._random.choice(self._servers), self._random.choice(MOMENTS)
        server.plan(kind, moment, self._random.randrange(2**16))
        while not server.done.wait(POLL_SECONDS):
            if deadline.passed:
                raise BenchmarkError(f"no {moment} reached server {server.number} in time")
        if kind == "kill":
            server.process.wait(SECONDS)
            server.start_again()
            deadline.served = server.start_seconds
        return {"moment": moment, "server": server.number}

    def _harm_rank(self, kind: str) -> int:
        time.sleep(self._random.uniform(0, LONGEST_WAIT))
        rank = {"rank": 1, "controller": 0}.get(kind, self._random.randrange(RANKS))
        if kind != "pause":
            self._trainer.signal_rank(rank, signal.SIGKILL)
            return rank
        pid = self._trainer.signal_rank(rank, signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        return rank

    def _fill_disk(self, deadline: Deadline) -> None:
        """Fill the folder of pushes until the run has said so."""
        said = self._trainer.output().count("No space left on device")
        filler = self._disk / "filler"
        try:
            while self._trainer.output().count("No space left on device") == said:
                with suppress(OSError), filler.open("ab", buffering=0) as file:
                    while True:
                        file.write(bytes(4096))
                if deadline.passed:
                    raise BenchmarkError("a full disk did not end the run in time")
                time.sleep(POLL_SECONDS)
        finally:
            filler.unlink()
