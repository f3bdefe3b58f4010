"""Runs the episodes of a batch together on one event loop, and makes one training batch of what they return."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from archon.generation.seeds import derive_seed
from archon.generation.types import GenerationHyperparameters, InferenceEngine
from archon.parallel.control_plane import ControlPlane
from archon.rl.algorithms.config import ZeroVarianceGroups
from archon.rl.episode import Episode
from archon.rl.episode_context import EpisodeContext, EpisodeEngine, workflow_context
from archon.rl.episode_io import error_kind, is_one_line, pack_episodes, unpack_episodes
from archon.rl.prompts import Prompt
from archon.rl.trajectories import checked_group, concat_padded_tensors, trajectory_ids
from archon.rl.workflow_row import WorkflowRow, copy_containers
from archon.rl.workflows.base import RolloutWorkflow
from archon.schema.errors import ConfigError, RolloutError, UserError
from archon.schema.lazy import import_dotted

FAILURES_AT_START = 16
"""So many failed episodes before the first success are no accident: the run stops without waiting for the rest."""

TRAIN_STREAM, EVAL_STREAM = 0, 1

GROUP_ADAPTER = "archon.rl.compat.areal.grouping.GroupedWorkflow"
"""By dotted path, as the core does not import other frameworks' forms."""


class WorkflowError(RuntimeError):
    """A workflow that failed on every prompt it was given; the first failure is its cause, traceback and all."""


class WorkflowRefusedError(WorkflowError, UserError):
    """A workflow that always failed by a mistake which archon itself names in one line: no traceback tells more."""


@dataclass
class RolloutBatch:
    """The groups of one step in the order their prompts were submitted.

    `trajectories` holds [B, S] and [B] tensors, `group_ids` and `trajectory_ids` int64 [B], the latter alike for rows
    that are parts of one trajectory; it is empty when no group was left. `prompts[g]` is the prompt of group g.
    `counts` says how much was lost and why, `numbers` holds the means of what workflows recorded. Where all groups were
    dropped for their zero variance, `dropped` has them.
    """

    trajectories: dict[str, Any] = field(default_factory=dict, repr=False)
    prompts: list[Prompt] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    numbers: dict[str, float] = field(default_factory=dict)
    dropped: RolloutBatch | None = field(default=None, repr=False)

    @classmethod
    def from_episodes(cls, episodes: Sequence[Episode], counts: Counter[str] | None = None) -> RolloutBatch:
        """Returns the batch of those episodes that have trajectories."""
        groups = [(e.prompt, e.trajectories) for e in episodes if e.trajectories]
        batch = cls(prompts=[prompt for prompt, _ in groups], counts=Counter() if counts is None else counts)
        if groups:
            size = max(len(group["rewards"]) for _, group in groups)
            numbered = [{**group, **_batch_ids(number, size, group)} for number, (_, group) in enumerate(groups)]
            batch.trajectories = concat_padded_tensors(numbered)
        return batch

    def __bool__(self) -> bool:
        return bool(self.prompts)

    def is_on_policy(self, version: int) -> bool:
        """Whether all tokens were sampled with the weights of `version`; those of unknown version pass."""
        versions = self.trajectories["versions"]
        return bool(((versions < 0) | (versions == version)).all())


def _batch_ids(number: int, size: int, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the ids of a group's rows, int64 [G], which no other group of the batch has; `size`: most rows of one."""
    own = trajectory_ids(group)
    return {"group_ids": torch.full_like(own, number), "trajectory_ids": number * size + own}


class Rollout:
    """Runs episodes of one workflow against one generator.

    Args:
        engine: the generator.
        workflow: turns a row into trajectories.
        seed: every random stream derives from (seed, stream, step, prompt's index, request's number).
        n_samples: trajectories in a group, where the workflow returns them one by one; by default those of its
            `gconfig`.
        check: raises for sampling values whose logprobs the trainer cannot recompute; sees every request.
        log: told of dropped samples and failed episodes, one line a step and kind.
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
        n_samples = n_samples if n_samples is not None else getattr(gconfig, "n_samples", 1)
        self._name = type(workflow).__name__
        self._grouped: RolloutWorkflow = import_dotted(GROUP_ADAPTER, "workflow adapter")(workflow, n_samples, log)
        self._seed = seed
        self._check = check
        self._log = log
        self._succeeded = False
        self._failures = 0
        self._first_error: BaseException | None = None

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

        Args:
            take: returns the next n prompts of the data stream; fewer when it ends.
            n_prompts: groups wanted.
            step: the trainer's step, from which random streams derive.
            zero_variance_groups: `keep` groups whose trajectories have one reward, `drop` them, or `resample`: take
                other prompts in their place until the batch is full. What is dropped or replaced is counted.
            max_resamples: most further rounds of prompts.
        """
        counts, kept, episodes = Counter[str](), list[Episode](), list[Episode]()
        for round_ in range(max_resamples + 1 if zero_variance_groups == "resample" else 1):
            prompts = take(n_prompts - len(kept))
            counts["resampled" if round_ else "prompts"] += len(prompts)
            episodes += await self.run(prompts, step)
            kept = [e for e in episodes if e.is_trainable(zero_variance_groups)]
            if len(kept) >= n_prompts or not prompts:
                break
        return self.batch_of(kept, episodes, counts, step)

    def batch_of(
        self, kept: Sequence[Episode], episodes: Sequence[Episode], counts: Counter[str], step: int
    ) -> RolloutBatch:
        """Returns the batch of the episodes `kept`, in their order; `episodes` are all that were run for it.

        Raises what `raise_if_empty` raises.
        """
        self.raise_if_empty(episodes)
        batch = RolloutBatch.from_episodes(kept, counts)
        if not batch:
            batch.dropped = RolloutBatch.from_episodes(episodes)
        self._count(batch, episodes)
        self._log_losses(batch, episodes, step)
        return batch

    async def run(self, prompts: Sequence[Prompt], step: int = 0, *, is_eval: bool = False) -> list[Episode]:
        """Run one episode for each prompt, all at once, and return them in the order of `prompts`.

        With several processes each runs its share of them, and all receive all results.

        Raises `WorkflowError` with the first failure as its cause once `FAILURES_AT_START` episodes failed before any
        succeeded.
        """
        episodes = [self._new_episode(prompt, step, is_eval) for prompt in prompts]
        world = ControlPlane.patient("rollouts")
        own = range(world.rank, len(prompts), world.size)
        tasks = [asyncio.create_task(self._run_episode(episodes[place])) for place in own]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        if world.size > 1:
            everyone = world.all_gather(pack_episodes({place: episodes[place] for place in own}))
            for rank, data in enumerate(everyone):
                if rank != world.rank:
                    unpack_episodes(data, episodes)
        return episodes

    async def run_one(self, prompt: Prompt, step: int) -> Episode:
        """Run one episode for training, and return it. Raises as `run` does."""
        episode = self._new_episode(prompt, step, is_eval=False)
        await self._run_episode(episode)
        return episode

    def _new_episode(self, prompt: Prompt, step: int, is_eval: bool) -> Episode:
        seed = derive_seed(self._seed, EVAL_STREAM if is_eval else TRAIN_STREAM, step, prompt.index)
        return Episode(prompt, EpisodeContext(prompt.index, is_eval, seed))

    async def _run_episode(self, episode: Episode) -> None:
        workflow_context.enter(episode.context)
        try:
            episode.trajectories = await self._group(episode.prompt, episode.context)
        except ConfigError:
            raise  # a mistake in the configuration is the same for every prompt
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a user's code: what it raises costs its episode
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            episode.error = error
            self._first_error = self._first_error or error
            self._failures += 1
            if not self._succeeded and self._failures >= FAILURES_AT_START:
                raise self._workflow_error(self._failures, self._first_error) from self._first_error
        else:
            self._succeeded = True

    async def _group(self, prompt: Prompt, context: EpisodeContext) -> dict[str, Any] | None:
        """Returns the group that the workflow makes of a prompt, checked, or None where it rejects it."""
        engine = EpisodeEngine(self.engine, context, None if context.is_eval else self._check)
        group = await self._grouped.arun_episode(engine, WorkflowRow(copy_containers(prompt.row)))
        return None if group is None else checked_group(group, context, self._name)

    def raise_if_empty(self, episodes: Sequence[Episode]) -> None:
        """Raise when no episode returned a trajectory: `WorkflowError` where any failed, else `RolloutError`."""
        failed = [e.error for e in episodes if e.error]
        if any(e.trajectories for e in episodes):
            return
        if failed:
            raise self._workflow_error(len(failed), failed[0]) from failed[0]
        if episodes:
            raise RolloutError(
                f"{self._name} rejected (returned None for) all {len(episodes)} prompts of a step; "
                "there is nothing to train on"
            )

    def _workflow_error(self, n: int, first: BaseException) -> WorkflowError:
        failed = f"{self._name} failed on {n} prompts and succeeded on none; the first failure"
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
            elif episode.zero_variance:
                batch.counts["zero_variance_groups"] += 1
        batch.counts["episodes"] = len(episodes)
        batch.numbers = recorded_means(episodes)

    def _log_losses(self, batch: RolloutBatch, episodes: Sequence[Episode], step: int) -> None:
        """Log one line for every kind of loss in this step, with its first error."""
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
    """Whether the running task itself is cancelled, and not something that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def recorded_means(episodes: Sequence[Episode]) -> dict[str, float]:
    """Returns the mean of each name that workflows recorded (`workflow_context.record`) over all episodes."""
    numbers: defaultdict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name, values in episode.context.numbers.items():
            numbers[name] += values
    return {name: sum(values) / len(values) for name, values in numbers.items()}
