"""Runs the episodes of a batch concurrently on one event loop, and makes a training batch of their trajectories."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from archon.generation.seeds import derive_seed
from archon.generation.types import GenerationHyperparameters, InferenceEngine
from archon.parallel.control_plane import ControlPlane
from archon.rl.agent_sampling import SamplingPolicy
from archon.rl.algorithms.config import ZeroVarianceGroups
from archon.rl.episode import Episode, error_kind, is_one_line, pack_episodes, unpack_episodes
from archon.rl.episode_context import EpisodeContext, EpisodeEngine, workflow_context
from archon.rl.prompts import Prompt
from archon.rl.trajectories import join_groups, trajectory_ids, validate_group
from archon.rl.workflow_row import WorkflowRow, copy_containers
from archon.rl.workflows.base import RolloutWorkflow
from archon.schema.errors import ConfigError, RolloutError, UserError
from archon.schema.lazy import import_dotted

MAX_INITIAL_FAILURES = 16
"""The run stops after this many failed episodes before the first success."""

TRAIN_STREAM, EVAL_STREAM = 0, 1

GROUP_ADAPTER = "archon.rl.compat.areal.grouping.GroupedWorkflow"
"""By dotted path, as the core does not import other frameworks' forms."""


class WorkflowError(RuntimeError):
    """A workflow failed on every prompt; the first failure is the cause."""


class WorkflowRefusedError(WorkflowError, UserError):
    """A workflow failed on every prompt by a mistake that a one-line message explains without a traceback."""


@dataclass
class RolloutBatch:
    """The groups of one step, in the order of their prompts.

    Attributes:
        trajectories: [B, S] and [B] tensors with `group_ids` and `trajectory_ids` int64 [B], equal for rows of one
            trajectory; empty where no group is left.
        prompts: the prompt of each group.
        counts: the number of losses by reason.
        numbers: the means of what workflows recorded.
        dropped: all groups, where all were dropped for zero variance.
    """

    trajectories: dict[str, Any] = field(default_factory=dict, repr=False)
    prompts: list[Prompt] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    numbers: dict[str, float] = field(default_factory=dict)
    dropped: RolloutBatch | None = field(default=None, repr=False)

    @classmethod
    def from_episodes(cls, episodes: Sequence[Episode], counts: Counter[str] | None = None) -> RolloutBatch:
        """Returns the batch of the episodes that have trajectories."""
        groups = [(e.prompt, e.trajectories) for e in episodes if e.trajectories]
        batch = cls(prompts=[prompt for prompt, _ in groups], counts=Counter() if counts is None else counts)
        if groups:
            size = max(len(group["rewards"]) for _, group in groups)
            numbered = []
            for number, (_, group) in enumerate(groups):
                ids = trajectory_ids(group)
                unique = {"group_ids": torch.full_like(ids, number), "trajectory_ids": number * size + ids}
                numbered.append({**group, **unique})
            batch.trajectories = join_groups(numbered)
        return batch

    def __bool__(self) -> bool:
        return bool(self.prompts)

    def is_on_policy(self, version: int) -> bool:
        """Returns whether all tokens of known version were sampled with the weights of `version`."""
        versions = self.trajectories["versions"]
        return bool(((versions < 0) | (versions == version)).all())


class Rollout:
    """Runs episodes of one workflow against one generator.

    Args:
        engine: the generator.
        workflow: turns a row into trajectories.
        seed: all random streams derive from (seed, stream, step, prompt's index, request's number).
        n_samples: trajectories in a group, where the workflow returns single ones; by default those of its `gconfig`.
        check: raises for sampling parameters of a request whose logprobs the trainer cannot recompute.
        accept: called with the tensors of each group for training; those it returns False for are replaced, as
            zero-variance groups are by `resample`. Every process calls it for all groups: it must be deterministic.
        agent_sampling: decides on those of agents' requests instead, except in an evaluation.
        world: the processes that share the episodes of `run`; by default all of the run.
        log: called with dropped samples and failed episodes, one line per step and kind.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        workflow: RolloutWorkflow,
        *,
        seed: int = 0,
        n_samples: int | None = None,
        check: Callable[[GenerationHyperparameters], None] | None = None,
        accept: Callable[[dict[str, Any]], bool] | None = None,
        agent_sampling: SamplingPolicy | None = None,
        world: ControlPlane | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        self.engine = engine
        self.workflow = workflow
        gconfig = getattr(workflow, "gconfig", None)
        n_samples = n_samples if n_samples is not None else getattr(gconfig, "n_samples", 1)
        self._name = type(workflow).__name__
        self._grouped: RolloutWorkflow = import_dotted(GROUP_ADAPTER, "workflow adapter")(workflow, n_samples, log)
        self._seed = seed
        self._check, self._agent_sampling = check, agent_sampling
        self._accept = accept
        self._world = world
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
            take: returns the next n prompts of the data stream, or fewer at its end.
            n_prompts: the number of groups.
            step: the trainer's step, which seeds random streams.
            zero_variance_groups: `keep` groups whose trajectories have one reward, `drop` them, or `resample`: replace
                them by other prompts. Dropped and replaced groups are counted.
            max_resamples: the maximal number of further rounds.
        """
        counts, kept, episodes = Counter[str](), list[Episode](), list[Episode]()
        replaces = zero_variance_groups == "resample" or self._accept is not None
        for round_ in range(max_resamples + 1 if replaces else 1):
            prompts = take(n_prompts - len(kept))
            counts["resampled" if round_ else "prompts"] += len(prompts)
            episodes += await self.run(prompts, step)
            kept = [e for e in episodes if e.is_trainable(zero_variance_groups)]
            if len(kept) >= n_prompts or not prompts:
                break
        return self.make_batch(kept, episodes, counts, step)

    def make_batch(
        self, kept: Sequence[Episode], episodes: Sequence[Episode], counts: Counter[str], step: int
    ) -> RolloutBatch:
        """Returns the batch of the episodes `kept` out of all `episodes` that were run; raises as `raise_if_empty`."""
        self.raise_if_empty(episodes)
        batch = RolloutBatch.from_episodes(kept, counts)
        if not batch:
            batch.dropped = RolloutBatch.from_episodes(episodes)
        self._count_and_log(batch, episodes, step)
        return batch

    async def run(self, prompts: Sequence[Prompt], step: int = 0, *, is_eval: bool = False) -> list[Episode]:
        """Runs one episode per prompt, all concurrently, and returns them in the order of `prompts`.

        With several processes each runs its share, and all receive all results. Raises `WorkflowError`, caused by the
        first failure, once `MAX_INITIAL_FAILURES` episodes failed before any succeeded.
        """
        episodes = [self._new_episode(prompt, step, is_eval) for prompt in prompts]
        world = self._world or ControlPlane.with_long_timeout("rollouts")
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
        if not is_eval:
            self._filter(episodes)
        return episodes

    async def run_one(self, prompt: Prompt, step: int) -> Episode:
        """Runs and returns one episode for training. Raises as `run` does."""
        episode = self._new_episode(prompt, step, is_eval=False)
        await self._run_episode(episode)
        self._filter([episode])
        return episode

    def _filter(self, episodes: Sequence[Episode]) -> None:
        """Marks the episodes whose groups the filter does not accept."""
        for episode in episodes:
            if self._accept is not None and episode.trajectories:
                episode.filtered = not self._accept(episode.trajectories)

    def _new_episode(self, prompt: Prompt, step: int, is_eval: bool) -> Episode:
        seed = derive_seed(self._seed, EVAL_STREAM if is_eval else TRAIN_STREAM, step, prompt.index)
        return Episode(prompt, EpisodeContext(prompt.index, is_eval, seed))

    async def _run_episode(self, episode: Episode) -> None:
        workflow_context.enter(episode.context)
        try:
            rules = (None, None) if episode.context.is_eval else (self._check, self._agent_sampling)
            engine = EpisodeEngine(self.engine, episode.context, *rules)
            group = await self._grouped.arun_episode(engine, WorkflowRow(copy_containers(episode.prompt.row)))
            episode.trajectories = None if group is None else validate_group(group, episode.context, self._name)
        except (ConfigError, KeyboardInterrupt, SystemExit):
            raise  # a mistake in the configuration is the same for every prompt
        except BaseException as error:  # whatever the user's code raises costs its episode
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the task itself is canceled, not something that it awaits
            episode.error = error
            self._first_error = self._first_error or error
            self._failures += 1
            if not self._succeeded and self._failures >= MAX_INITIAL_FAILURES:
                raise self._workflow_error(self._failures, self._first_error) from self._first_error
        else:
            self._succeeded = True

    def raise_if_empty(self, episodes: Sequence[Episode]) -> None:
        """Raises where no episode has a trajectory: `WorkflowError` if any failed, else `RolloutError`."""
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

    def _count_and_log(self, batch: RolloutBatch, episodes: Sequence[Episode], step: int) -> None:
        """Sets the batch's counts, and logs one line per kind of loss with its first error."""
        first: dict[str, BaseException] = {}
        for episode in episodes:
            batch.counts.update({f"dropped/{kind}": n for kind, n in episode.context.drops.items()})
            for kind, error in episode.context.first_errors.items():
                first.setdefault(f"dropped/{kind}", error)
            if episode.error:
                name = f"failed/{error_kind(episode.error)}"
                batch.counts[name] += 1
                first.setdefault(name, episode.error)
            elif episode.trajectories is None:
                batch.counts["rejected"] += 1
                continue
            if episode.trajectories and episode.zero_variance:
                batch.counts["zero_variance_groups"] += 1
            if episode.filtered:
                batch.counts["filtered_groups"] += 1
        batch.counts["episodes"] = len(episodes)
        batch.numbers = recorded_means(episodes)
        for name, error in first.items():
            what = "samples dropped" if name.startswith("dropped/") else "episodes failed"
            self._log(f"step {step}: {batch.counts[name]} {what} ({name.partition('/')[2]}): {error}")


def recorded_means(episodes: Sequence[Episode]) -> dict[str, float]:
    """Returns the mean of each name that workflows recorded, over all episodes."""
    numbers: defaultdict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name, values in episode.context.numbers.items():
            numbers[name] += values
    return {name: sum(values) / len(values) for name, values in numbers.items()}
