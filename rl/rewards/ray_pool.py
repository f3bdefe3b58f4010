"""Reward processes on a Ray cluster: each actor holds a `WorkerPool` of one that enforces the time-out."""

from __future__ import annotations

import json
from collections.abc import Sequence

from archon.remote.config import WorkersConfig
from archon.rl.ray_workers import RayWorkers, WorkerActor, WorkerLostError, WorkersBrokenError
from archon.rl.rewards.pool import START_SECONDS, Outcome, WorkerPool
from archon.rl.rewards.result import Reward, RewardCrashed, RewardFailure, RewardInvalid, RewardRaised, RewardTimeout
from archon.schema.errors import RewardError

_SLACK_SECONDS = 30.0
_FAILURES: dict[str, type[RewardFailure]] = {
    failure.kind: failure for failure in (RewardTimeout, RewardCrashed, RewardInvalid)
}


class RewardActor(WorkerActor):
    """Ray actor with one reward process."""

    def __init__(self, path: Sequence[str], setup: bytes, name: str, timeout_seconds: float) -> None:
        super().__init__(path)
        self._pool = WorkerPool(setup, name, timeout_seconds, max_workers=1)

    async def run(self, call: bytes) -> bytes:
        """Return the outcome of one call as JSON."""
        return pack_outcome(await self._pool.run(call))


class RayPool:
    """Pool like `WorkerPool`, with its processes on the nodes of a Ray cluster.

    A call without an outcome (its node is cut off or its actor hangs) fails after the limits of process start and
    execution plus `_SLACK_SECONDS`.
    """

    def __init__(
        self, setup: bytes, name: str, timeout_seconds: float, max_workers: int, config: WorkersConfig
    ) -> None:
        self.name = name
        self._seconds = START_SECONDS + timeout_seconds + _SLACK_SECONDS
        arguments = (setup, name, timeout_seconds)
        self._workers = RayWorkers(RewardActor, arguments, config, max_workers, 1, f"reward {name}")

    async def run(self, frame: bytes) -> Outcome:
        """Run one call with pickled arguments and return its outcome."""
        try:
            return unpack_outcome(await self._workers.run(frame, self._seconds))
        except WorkerLostError as error:
            return RewardCrashed(str(error))
        except TimeoutError:
            return RewardCrashed(f"a worker of reward {self.name} did not answer within {self._seconds:g} s")
        except WorkersBrokenError as error:
            return RewardError(str(error))

    def close(self) -> None:
        """End the processes; calls without an outcome fail."""
        self._workers.close()


def pack_outcome(outcome: Outcome) -> bytes:
    """Return an outcome as JSON."""
    if isinstance(outcome, Reward):
        return json.dumps({"total": float(outcome), "parts": outcome.parts}).encode()
    kind = outcome.kind if isinstance(outcome, RewardFailure) else None
    notes = "\n".join(getattr(outcome, "__notes__", []))
    return json.dumps({"kind": kind, "text": str(outcome), "notes": notes}).encode()


def unpack_outcome(answer: bytes) -> Outcome:
    """Return the outcome serialized by `pack_outcome`."""
    reply = json.loads(answer)
    if "total" in reply:
        return Reward(reply["total"], reply["parts"])
    if reply["kind"] == RewardRaised.kind:
        return RewardRaised(reply["text"], reply["notes"])
    error = _FAILURES.get(reply["kind"], RewardError)(reply["text"])
    if reply["notes"]:
        error.add_note(reply["notes"])
    return error
