"""Runs the episodes of a batch together on one event loop, and makes one training batch of what they return."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from archon.generation.record import UnusableAnswerError
from archon.generation.seeds import derive_seed
from archon.generation.types import GenerationHyperparameters, InferenceEngine
from archon.parallel.world import World
from archon.rl.context import EpisodeContext, EpisodeEngine, workflow_context
from archon.rl.episode import Episode
from archon.rl.episode_io import error_kind, is_one_line, pack_episodes, unpack_episodes
from archon.rl.prompts import Prompt
from archon.rl.rewards import RewardFailure
from archon.rl.rows import Row, own_copy
from archon.rl.trajectories import concat_padded_tensors
from archon.rl.workflows.base import RolloutWorkflow, count_lost
from archon.rl.workflows.results import checked_result, completed, is_one_trajectory, joined, trajectory_ids
from archon.schema.errors import ConfigError, RolloutError, UserError

if TYPE_CHECKING:
    from archon.rl.algorithms.config import ZeroVarianceGroups

FAILURES_AT_START = 16
"""So many failed episodes before the first success are no accident: the run stops without waiting for the rest."""

TRAIN_STREAM, EVAL_STREAM = 0, 1


class WorkflowError(RuntimeError):
    """A workflow that failed on every prompt it was given; the first failure is its cause, traceback and all."""


class WorkflowRefusedError(WorkflowError, UserError):
    """A workflow that always failed by a mistake which archon itself names in one line: no traceback tells more."""


@dataclass
class RolloutBatch:
    """The groups of one step in the order their prompts were submitted.

    `trajectories` holds [B, S] and [B] tensors, `group_ids` and `trajectory_ids` int64 [B], the latter alike for rows
    that are parts of one trajectory; it is empty when no group was left. `prompts[g]` is the prompt of group g.
    `counts` says how much was lost and why, `numbers` what workflows recorded (means). Where all groups were dropped
    for want of spread, they are `dropped`.
    """

    trajectories: dict[str, Any] = field(default_factory=dict, repr=False)
    prompts: list[Prompt] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    numbers: dict[str, float] = field(default_factory=dict)
    dropped: RolloutBatch | None = field(default=None, repr=False)

    @classmethod
    def of_groups(cls, episodes: Sequence[Episode], counts: Counter[str] | None = None) -> RolloutBatch:
        """Of those episodes that have trajectories."""
        groups = [(e.prompt, e.trajectories) for e in episodes if e.trajectories]
        batch = cls(prompts=[prompt for prompt, _ in groups], counts=Counter() if counts is None else counts)
        if groups:
            size = max(len(group["rewards"]) for _, group in groups)
            joined = [{**group, **_ids(number, size, group)} for number, (_, group) in enumerate(groups)]
            batch.trajectories = concat_padded_tensors(joined)
        return batch

    def __bool__(self) -> bool:
        return bool(self.prompts)

    def is_of(self, version: int) -> bool:
        """Whether all tokens were sampled with the weights of `version`; those of unknown version pass."""
        versions = self.trajectories["versions"]
        return bool(((versions < 0) | (versions == version)).all())


def _ids(number: int, size: int, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The ids of a group's rows, [G]: its number, and trajectories of their own; no group has more rows than `size`."""
    own = trajectory_ids(group)
    return {"group_ids": torch.full_like(own, number), "trajectory_ids": number * size + own}


class Rollout:
    """Runs episodes of one workflow against one generator.

    A prompt's group is what one run of the workflow returns, or what `n_samples` runs do: see
    `RolloutWorkflow.returns_group`.

    Args:
        engine: the generator.
        workflow: turns a row into trajectories.
        seed: every random stream derives from (seed, stream, step, prompt's index, request's number).
        n_samples: of a group, where each is a run of its own; by default those of the workflow's `gconfig`.
        check: refuses sampling values that the trainer cannot replay; sees every request.
        log: where losses are announced, one line a step and kind.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        workflow: RolloutWorkflow,
        *,
        seed: int = 0,
        n_samples: int | None = None,
        check: Callable[[GenerationHyperparameters], None] | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        self.engine = engine
        self.workflow = workflow
        gconfig = getattr(workflow, "gconfig", None)
        self.n_samples: int = n_samples if n_samples is not None else getattr(gconfig, "n_samples", 1)
        self._seed = seed
        self._check = check
        self._log = log
        self._succeeded = False
        self._failures = 0
        self._first_error: BaseException | None = None
        self._said_repeated = False

    async def collect(
        self,
        take: Callable[[int], Sequence[Prompt]],
        n_prompts: int,
        step: int,
        *,
        zero_variance_groups: ZeroVarianceGroups = "keep",
        max_resamples: int = 0,
    ) -> RolloutBatch:
        """Returns one training batch of up to `n_prompts` groups.

        Groups of equal reward are kept, dropped, or dropped and resampled: up to `max_resamples` further rounds of
        prompts are taken until the batch is full. Both the dropped and the replaced are counted.

        Args:
            take: gives the next n prompts of the data stream; fewer when it ends.
        """
        counts, kept, episodes = Counter[str](), list[Episode](), list[Episode]()
        for refill in range(max_resamples + 1 if zero_variance_groups == "resample" else 1):
            prompts = take(n_prompts - len(kept))
            counts["refills" if refill else "prompts"] += len(prompts)
            episodes += await self.run(prompts, step)
            kept = [e for e in episodes if e.trajectories and (zero_variance_groups == "keep" or e.has_spread)]
            if len(kept) >= n_prompts or not prompts:
                break
        return self.batch_of(kept, episodes, counts, step)

    def batch_of(
        self, kept: Sequence[Episode], episodes: Sequence[Episode], counts: Counter[str], step: int
    ) -> RolloutBatch:
        """The batch that `kept` make, in their order; `episodes` are all that were run for it.

        Raises what `stop_if_nothing_came` raises.
        """
        self.stop_if_nothing_came(episodes)
        batch = RolloutBatch.of_groups(kept, counts)
        if not batch:
            batch.dropped = RolloutBatch.of_groups(episodes)
        self._count(batch, episodes)
        self._announce(batch, episodes, step)
        return batch

    async def run(self, prompts: Sequence[Prompt], step: int = 0, *, is_eval: bool = False) -> list[Episode]:
        """Run one episode for each prompt, all at once; results in the order of `prompts`.

        With several processes each runs its share of them and is told the others' results, so that all know all.

        Raises `WorkflowError` with the first failure as its cause once `FAILURES_AT_START` episodes failed before any
        succeeded.
        """
        episodes = [self._new_episode(prompt, step, is_eval) for prompt in prompts]
        world = World.now()
        own = range(world.rank, len(prompts), world.size)
        tasks = [asyncio.create_task(self._episode(episodes[place])) for place in own]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        if world.size > 1:
            everyone = world.gather(pack_episodes({place: episodes[place] for place in own}))
            for rank, data in enumerate(everyone):
                if rank != world.rank:
                    unpack_episodes(data, episodes)
        return episodes

    async def episode(self, prompt: Prompt, step: int) -> Episode:
        """Run one for training. Raises as `run` does."""
        episode = self._new_episode(prompt, step, is_eval=False)
        await self._episode(episode)
        return episode

    def _new_episode(self, prompt: Prompt, step: int, is_eval: bool) -> Episode:
        seed = derive_seed(self._seed, EVAL_STREAM if is_eval else TRAIN_STREAM, step, prompt.index)
        return Episode(prompt, EpisodeContext(prompt.index, is_eval, seed))

    async def _episode(self, episode: Episode) -> None:
        workflow_context.enter(episode.context)
        try:
            episode.trajectories = await self._group(episode.prompt, episode.context)
        except ConfigError:
            raise  # a mistake in the configuration is the same for every prompt
        except (Exception, asyncio.CancelledError) as error:  # a user's code: what it raises costs its episode
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            episode.error = error
            self._first_error = self._first_error or error
            self._failures += 1
            if not self._succeeded and self._failures >= FAILURES_AT_START:
                raise self._always_fails(self._failures, self._first_error) from self._first_error
        else:
            self._succeeded = True

    async def _group(self, prompt: Prompt, context: EpisodeContext) -> dict[str, Any] | None:
        """What one run of the workflow makes of a prompt, or so many as its group has trajectories."""
        returns_group = getattr(self.workflow, "returns_group", None)
        runs: list[dict[str, Any]] = []
        if returns_group is not False:
            single, first = await self._run(prompt, context)
            if returns_group or self.n_samples == 1 or first is None or not single:
                return first
            runs.append(first)
            self._say_repeated(context)
        outcomes = await asyncio.gather(
            *(self._run(prompt, context, run) for run in range(len(runs), self.n_samples)), return_exceptions=True
        )
        lost: list[BaseException] = []
        for outcome in outcomes:
            if isinstance(outcome, RewardFailure | UnusableAnswerError):
                count_lost(outcome)
                lost.append(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            elif (result := outcome[1]) is None:
                count_lost(UnusableAnswerError("rejected_run", "a run of the workflow returned None"))
            elif not outcome[0]:
                raise RolloutError(
                    f"{type(self.workflow).__name__}: a run of several for one prompt returned several trajectories; "
                    "return one, or set returns_group = True on the class and return the whole group"
                )
            else:
                runs.append(result)
        if not runs and lost:
            raise lost[0]
        return joined(runs) if runs else None

    async def _run(
        self, prompt: Prompt, context: EpisodeContext, run: int | None = None
    ) -> tuple[bool, dict[str, Any] | None]:
        """One run of the workflow, whose answers nobody else's result can refer to: whether it returned a single
        trajectory, and what can be trained on. `run` is its number of several, which are tasks of their own."""
        if run is not None:
            context = workflow_context.enter_sample(run)
            context.seed = derive_seed(context.seed, run, 0) if run else context.seed
        engine = EpisodeEngine(self.engine, context, None if context.is_eval else self._check)
        result = await self.workflow.arun_episode(engine, Row(own_copy(prompt.row)))
        name, apart = type(self.workflow).__name__, getattr(self.workflow, "returns_group", None) is True
        single, result = is_one_trajectory(result), completed(result, engine.answered, name, apart=apart)
        return single, None if result is None else checked_result(result, context, name)

    def _say_repeated(self, context: EpisodeContext) -> None:
        if self._said_repeated or context.is_eval:
            return
        self._said_repeated = True
        self._log(
            f"{type(self.workflow).__name__} returned one trajectory, so each prompt is run {self.n_samples} times, "
            "which gconfig.n_samples says, for a group; returns_group = False on the class starts all runs at once, "
            "True says that one is the whole group"
        )

    def stop_if_nothing_came(self, episodes: Sequence[Episode]) -> None:
        """Raise when no episode returned a trajectory: `WorkflowError` where any failed, else `RolloutError`."""
        failed = [e.error for e in episodes if e.error]
        if any(e.trajectories for e in episodes):
            return
        if failed:
            raise self._always_fails(len(failed), failed[0]) from failed[0]
        if episodes:
            raise RolloutError(
                f"{type(self.workflow).__name__} rejected (returned None for) all {len(episodes)} prompts of a step; "
                "there is nothing to train on"
            )

    def _always_fails(self, n: int, first: BaseException) -> WorkflowError:
        failed = f"{type(self.workflow).__name__} failed on {n} prompts and succeeded on none; the first failure"
        if is_one_line(first):
            return WorkflowRefusedError(f"{failed}: {first}")
        return WorkflowError(f"{failed}, whose traceback stands above: {error_kind(first)}: {first}")

    def _count(self, batch: RolloutBatch, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            batch.counts.update({f"dropped/{kind}": n for kind, n in episode.context.drops.items()})
            if episode.error:
                batch.counts[f"failed/{error_kind(episode.error)}"] += 1
            elif episode.trajectories is None:
                batch.counts["rejected"] += 1
            elif not episode.has_spread:
                batch.counts["groups_without_spread"] += 1
        batch.counts["episodes"] = len(episodes)
        batch.numbers = recorded_means(episodes)

    def _announce(self, batch: RolloutBatch, episodes: Sequence[Episode], step: int) -> None:
        """One line for every way in which something was lost in this step, with its first error."""
        first: dict[str, BaseException] = {}
        for episode in episodes:
            for kind, error in episode.context.first_errors.items():
                first.setdefault(f"dropped/{kind}", error)
            if episode.error:
                first.setdefault(f"failed/{error_kind(episode.error)}", episode.error)
        for name, error in first.items():
            what = "samples dropped" if name.startswith("dropped/") else "episodes failed"
            self._log(f"step {step}: {batch.counts[name]} {what} ({name.partition('/')[2]}): {error}")


def _is_cancelled() -> bool:
    """Whether the running task itself is to end, and not something that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def recorded_means(episodes: Sequence[Episode]) -> dict[str, float]:
    """What workflows recorded (`workflow_context.record`): the mean of each name over all episodes."""
    numbers: defaultdict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name, values in episode.context.numbers.items():
            numbers[name] += values
    return {name: sum(values) / len(values) for name, values in numbers.items()}
