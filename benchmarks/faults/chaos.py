"""Harm to a run, event after event, each with the time that the run may take until it is whole again."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.served import CUT_SECONDS, KINDS, MOMENTS, Served
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
"""What a start or a step may take, of what it took while nothing was harmed: the machine has other users."""
_HARM = {"stop": STOPPED_SECONDS, "pause": STOPPED_SECONDS, "cut": CUT_SECONDS}
_TIME_OUTS = 2
"""One for the request under way, and one for the next push to a server that is still out."""
_STEPS = 5
"""Of an event: the one under way, the one that it costs, one that leaves a server out, and two that are whole."""


@dataclass(frozen=True)
class Pace:
    """Seconds on this machine while nothing is harmed: of a server's start, of a run's until its second step is done,
    and of a step."""

    server: float
    run: float
    step: float

    def limit(self, kind: str) -> float:
        """Returns the seconds after which a run that an event of this kind befell hangs.

        These are the harm's own, the time-outs that it may cost, and what must be done again. Where a rank was harmed,
        torchrun may start its ranks in vain, and then itself be started again.
        """
        starts = self.server if kind == "kill" else 2 * self.run if kind in (*OF_RANKS, "disk") else 0.0
        return _HARM.get(kind, 0.0) + _TIME_OUTS * SECONDS + TIMES_SLOWER * (starts + _STEPS * self.step)


class Chaos:
    """Does harm to a run, event after event, each once the run has overcome the last."""

    def __init__(
        self, servers: Sequence[Served], trainer: Trainer, disk: Path, kinds: Sequence[str], seed: int
    ) -> None:
        self._servers, self._trainer, self._disk, self._kinds = servers, trainer, disk, kinds
        self._random = random.Random(seed)

    def begin(self) -> Pace:
        """Returns the pace of a run that nobody harms, once it has begun."""
        seconds = self._until_whole(time.monotonic() + BEGIN_SECONDS)
        started = time.monotonic()
        self._until_whole(started + BEGIN_SECONDS)
        step = (time.monotonic() - started) / 2
        return Pace(max(server.start_seconds for server in self._servers), seconds, step)

    def do(self, number: int, pace: Pace) -> dict[str, Any]:
        """Returns the event, once it was done and overcome. Raises BenchmarkError where that takes too long."""
        kinds, starts = self._kinds, self._trainer.starts
        # Each kind once before any is drawn.
        kind = kinds[number] if number < len(kinds) else self._random.choice(kinds)
        event: dict[str, Any] = {"event": number, "kind": kind}
        started, limit = time.monotonic(), pace.limit(kind)
        until = started + limit
        if kind == "disk":
            self._fill_disk(until)
        elif kind in OF_RANKS:
            event |= {"rank": self._harm_rank(kind)}
        else:
            event |= self._harm_server(kind, until)
        self._until_whole(until)
        seconds = round(time.monotonic() - started, 1)
        again = self._trainer.starts - starts
        return event | {"run_started_again": again, "seconds": seconds, "limit": round(limit, 1)}

    def _until_whole(self, until: float) -> float:
        """Waits for two further steps, with a push to every server in each, and starts a run again that has ended.
        Returns the seconds that it took. Raises BenchmarkError where it is not so by `until`."""
        started, before = time.monotonic(), None
        while time.monotonic() < until:
            self._trainer.keep()
            last = self._trainer.steps()[-2:]
            step = last[-1]["step"] if last else 0
            before = step if before is None else min(before, step)  # a resumed run drops those after its checkpoint
            if step >= before + 2 and all(record.get("push/servers") == len(self._servers) for record in last):
                return time.monotonic() - started
            time.sleep(0.05)
        raise BenchmarkError(
            f"not whole again within {until - started:.0f} s; the run said: {self._trainer.output()[-3000:]}"
        )

    def _harm_server(self, kind: str, until: float) -> dict[str, Any]:
        server, moment = self._random.choice(self._servers), self._random.choice(MOMENTS)
        server.plan(kind, moment, self._random.randrange(2**16))
        if not server.done.wait(until - time.monotonic()):
            raise BenchmarkError(f"no {moment} reached server {server.number} in time")
        if kind == "kill":
            server.process.wait(SECONDS)
            server.start_again()
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

    def _fill_disk(self, until: float) -> None:
        """Fills the folder of pushes until the run has said so."""
        said = self._trainer.output().count("No space left on device")
        filler = self._disk / "filler"
        try:
            while self._trainer.output().count("No space left on device") == said:
                with suppress(OSError), filler.open("ab", buffering=0) as file:
                    while True:
                        file.write(bytes(4096))
                if time.monotonic() > until:
                    raise BenchmarkError("a full disk did not end the run in time")
                time.sleep(0.05)
        finally:
            filler.unlink()
