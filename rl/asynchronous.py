"""Asynchronous rollout: generation of the next batches overlaps with training.

The staleness η is bounded: a group is trained at most η versions after it started. With B groups per step and C
concurrent episodes,

    min(C - running, (η + version + 1) · B - (accepted + running))

episodes may start (AReaL, Fu et al. 2025, arXiv:2505.24298). Failed, rejected and replaced episodes do not count. A
step waits for the at most B groups that would be too old for the next step.

With several processes, the controller alone runs the episodes: B, C, the bound and the prompt order do not depend on
the layout.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from archon.rl.episode import HEADER_BYTES, Episode, pack_episodes, unpack_episodes
from archon.rl.episode_context import EpisodeContext
from archon.rl.prompts import Prompt
from archon.rl.rollout import Rollout, RolloutBatch


def capacity(running: int, accepted: int, version: int, *, staleness: int, batch: int, concurrent: int) -> int:
    """Return how many episodes may start (may be negative); `accepted` counts the whole run."""
    return min(concurrent - running, (staleness + version + 1) * batch - (accepted + running))


@dataclass(eq=False)
class InFlight:
    """Episode with its start version, and its result once it has ended."""

    prompt: Prompt
    version: int
    episode: Episode | None = None
    trainable: bool = False
    task: asyncio.Task[None] | None = field(default=None, repr=False)


@dataclass
class GatheredBatch:
    """Episodes of a step: the first `n_kept` are trained; the others were rejected or replaced."""

    episodes: list[Episode]
    n_kept: int
    counts: Counter[str]

    def batch(self, rollout: Rollout, step: int) -> RolloutBatch:
        """Return the training batch. Raises like `Rollout.raise_if_empty`."""
        return rollout.make_batch(self.episodes[: self.n_kept], self.episodes, self.counts, step)

    def pack(self) -> bytes:
        """Serialize the batch for other processes, without the rows: they have the dataset."""
        prompts = [episode.prompt.index for episode in self.episodes]
        header = json.dumps({"prompts": prompts, "kept": self.n_kept, "counts": self.counts}).encode()
        packed = pack_episodes(dict(enumerate(self.episodes)))
        return len(header).to_bytes(HEADER_BYTES, "big") + header + packed

    @classmethod
    def unpack(cls, data: bytes, prompt_at: Callable[[int], Prompt]) -> GatheredBatch:
        """Deserialize the result of `pack`; `prompt_at` returns the prompt of an ordinal."""
        start = HEADER_BYTES + int.from_bytes(data[:HEADER_BYTES], "big")
        header = json.loads(data[HEADER_BYTES:start])
        episodes = [Episode(prompt_at(index), EpisodeContext(index)) for index in header["prompts"]]
        unpack_episodes(data[start:], episodes)
        return cls(episodes, header["kept"], Counter(header["counts"]))


class AsyncRollout:
    """Episodes that keep running on one event loop; ended ones form training batches.

    Args:
        rollout: runs the episodes.
        take: returns the next n prompts of the data stream.
        batch: B, groups per step.
        staleness: η, in versions.
        concurrent: C, the maximum number of running episodes; None: as many as the staleness allows.
        max_resamples: at most `max_resamples` · B episodes of a batch are replaced.
    """

    def __init__(
        self,
        rollout: Rollout,
        take: Callable[[int], Sequence[Prompt]],
        *,
        batch: int,
        staleness: int,
        concurrent: int | None = None,
        max_resamples: int = 3,
    ) -> None:
        self._rollout, self._take = rollout, take
        self._batch, self._staleness = batch, staleness
        self._concurrent = (staleness + 1) * batch if concurrent is None else concurrent
        self._max_resamples = max_resamples
        self._version = self._accepted = 0  # at the last batch
        self._running: list[InFlight] = []
        self._done: list[InFlight] = []  # accepted and untrained, in the order they ended
        self._replaced: list[Episode] = []  # since the last batch
        self._ended = asyncio.Event()
        self._error: BaseException | None = None

    @property
    def untrained(self) -> list[int]:
        """Sorted ordinals of prompts that were taken but are in no batch yet."""
        waiting = [item.prompt for item in [*self._running, *self._done]]
        return sorted(prompt.index for prompt in [*waiting, *(episode.prompt for episode in self._replaced)])

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
            item = InFlight(prompt, self._version)
            self._running.append(item)
            item.task = asyncio.create_task(self._run(item), name=f"episode {prompt.index}")

    async def collect(self, step: int) -> RolloutBatch:
        """Return the batch of `gather`; raise `RolloutError` if all of it was rejected."""
        return (await self.gather()).batch(self._rollout, step)

    async def gather(self) -> GatheredBatch:
        """Return the next B groups: first the groups too old for the next step, then by end time.

        Raises like `Rollout.run`.
        """
        # 1. Start as many episodes as the staleness allows. `accepted` derives from the version: an empty batch, which
        # changes no weights, does not count.
        self._version = self._rollout.engine.version
        self._accepted = self._version * self._batch + len(self._done)
        self._fill()
        # 2. Wait until the batch is complete.
        while not self._is_complete():
            self._ended.clear()
            await self._ended.wait()
            if self._error is not None:
                raise self._error
        # 3. Take the oldest groups first, in prompt order.
        self._done.sort(key=lambda item: item.version > self._version - self._staleness)
        chosen, self._done = self._done[: self._batch], self._done[self._batch :]
        chosen.sort(key=lambda item: item.prompt.index)
        kept = [item.episode for item in chosen if item.trainable and item.episode]
        dropped = [item.episode for item in chosen if not item.trainable and item.episode] + self._replaced
        counts = Counter(prompts=self._batch, resampled=len(self._replaced), running=len(self._running))
        self._replaced = []
        return GatheredBatch(kept + dropped, len(kept), counts)

    async def close(self) -> None:
        """Cancel running episodes."""
        tasks = [item.task for item in self._running if item.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_complete(self) -> bool:
        overdue = any(item.version <= self._version - self._staleness for item in self._running)
        return len(self._done) >= self._batch and not overdue

    async def _run(self, item: InFlight) -> None:
        try:
            item.episode = await self._rollout.run_one(item.prompt, item.version)
        except BaseException as error:
            self._error = self._error or error
            if isinstance(error, Exception):
                return  # `gather` raises it; raised here too, asyncio would print it
            raise
        finally:
            self._running.remove(item)
            self._ended.set()
        episode = item.episode
        rule = self._rollout.rule_of(item.prompt)
        item.trainable = episode.is_trainable(rule)
        unwanted = episode.filtered or (rule.zero_variance == "resample" and not item.trainable)
        replaced = not episode.trajectories or unwanted
        if replaced and len(self._replaced) < self._max_resamples * self._batch:
            self._replaced.append(episode)
        else:
            self._accepted += 1
            self._done.append(item)
        self._fill()
