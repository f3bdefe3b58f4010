"""Rollouts that run ahead of training: while one batch is trained on, the answers of the next ones are being sampled.

How far ahead is bounded by the staleness η: no group is trained on by a policy more than η versions after the one it
was begun with. With B groups a step and C episodes at once, as many episodes may be started as

    min(C - running, (η + version + 1) · B - (accepted + running))

(AReaL, Fu et al. 2025, arXiv:2505.24298). An episode that failed, was rejected or is to be replaced gives its place
back. A step waits for the groups that would be too old for the next one; these are at most B, since no more had been
admitted by then.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from archon.rl.algorithms.config import ZeroVarianceGroups
from archon.rl.episode import Episode
from archon.rl.prompts import Prompt
from archon.rl.rollout import Rollout, RolloutBatch


def capacity(running: int, accepted: int, version: int, *, staleness: int, batch: int, concurrent: int) -> int:
    """How many episodes may be started now; `accepted` counts all since the run began, negative means none."""
    return min(concurrent - running, (staleness + version + 1) * batch - (accepted + running))


@dataclass(eq=False)
class _Flight:
    """An episode on its way: the version it began with, and in the end what became of it."""

    prompt: Prompt
    version: int
    episode: Episode | None = None
    usable: bool = False  # has something to train on
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class RolloutAhead:
    """Keeps episodes running, and makes training batches of those that are done. One event loop, one thread.

    Args:
        rollout: runs the episodes.
        take: gives the next n prompts of the data stream.
        batch: B, groups a step.
        staleness: η, in versions.
        concurrent: C, episodes at once; None: as many as the staleness admits.
        zero_variance_groups: `keep` groups of equal reward; `drop` them, which leaves a batch smaller; or `resample`.
        max_resamples: at most so many times B places of a batch are given back and filled again.
    """

    def __init__(
        self,
        rollout: Rollout,
        take: Callable[[int], Sequence[Prompt]],
        *,
        batch: int,
        staleness: int,
        concurrent: int | None = None,
        zero_variance_groups: ZeroVarianceGroups = "keep",
        max_resamples: int = 3,
    ) -> None:
        self._rollout, self._take = rollout, take
        self._batch, self._staleness = batch, staleness
        self._concurrent = (staleness + 1) * batch if concurrent is None else concurrent
        self._zero_variance, self._max_resamples = zero_variance_groups, max_resamples
        self._version = self._accepted = 0  # as of the last batch
        self._running: list[_Flight] = []
        self._done: list[_Flight] = []  # accepted and not yet trained on, in the order they ended
        self._lost: list[Episode] = []  # that gave their place back since the last batch
        self._ended = asyncio.Event()
        self._error: BaseException | None = None

    @property
    def running(self) -> int:
        """Episodes that are being run."""
        return len(self._running)

    @property
    def ahead(self) -> list[int]:
        """Ordinals of the prompts that were taken and not trained on, in order."""
        return sorted(flight.prompt.index for flight in [*self._running, *self._done])

    def _fill(self) -> None:
        free = capacity(
            len(self._running),
            self._accepted,
            self._version,
            staleness=self._staleness,
            batch=self._batch,
            concurrent=self._concurrent,
        )
        for prompt in self._take(free) if free > 0 else ():
            flight = _Flight(prompt, self._version)
            self._running.append(flight)
            flight.task = asyncio.create_task(self._fly(flight), name=f"episode {prompt.index}")

    async def collect(self, step: int) -> RolloutBatch:
        """The next B groups: first those that would be too old for the step after this one, then as they ended.

        Raises what `Rollout.run` raises, and `RolloutError` where a whole batch was rejected.
        """
        self._version = self._rollout.engine.version
        # A batch without anything to train on was no step: its places are free again.
        self._accepted = self._version * self._batch + len(self._done)
        self._fill()
        while not self._complete():
            self._ended.clear()
            await self._ended.wait()
            if self._error is not None:
                raise self._error
        self._done.sort(key=lambda flight: flight.version > self._version - self._staleness)
        chosen, self._done = self._done[: self._batch], self._done[self._batch :]
        chosen.sort(key=lambda flight: flight.prompt.index)
        kept = [flight.episode for flight in chosen if flight.usable and flight.episode]
        episodes = [flight.episode for flight in chosen if flight.episode] + self._lost
        counts = Counter(prompts=self._batch, refills=len(self._lost))
        self._lost = []
        return self._rollout.batch_of(kept, episodes, counts, step)

    async def close(self) -> None:
        """End what is running."""
        tasks = [flight.task for flight in self._running if flight.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _complete(self) -> bool:
        overdue = any(flight.version <= self._version - self._staleness for flight in self._running)
        return len(self._done) >= self._batch and not overdue

    async def _fly(self, flight: _Flight) -> None:
        try:
            flight.episode = await self._rollout.episode(flight.prompt, flight.version)
        except BaseException as error:
            self._error = self._error or error
            raise
        finally:
            self._running.remove(flight)
            self._ended.set()
        episode = flight.episode
        flight.usable = bool(episode.trajectories) and (self._zero_variance == "keep" or episode.has_spread)
        replaced = not episode.trajectories or (self._zero_variance == "resample" and not flight.usable)
        if replaced and len(self._lost) < self._max_resamples * self._batch:
            self._lost.append(episode)
        else:
            self._accepted += 1
            self._done.append(flight)
        self._fill()
