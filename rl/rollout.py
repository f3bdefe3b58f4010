"""Rollout: concurrent episodes on one event loop, joined into a training batch."""

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
from archon.rl.algorithms.config import GroupRule
from archon.rl.episode import Episode, error_kind, is_one_line, pack_episodes, unpack_episodes
from archon.rl.episode_context import EpisodeContext, EpisodeEngine, workflow_context
from archon.rl.prompts import Prompt
from archon.rl.trajectories import join_groups, trajectory_ids, validate_group
from archon.rl.workflow_row import WorkflowRow, copy_containers
from archon.rl.workflows.base import RolloutWorkflow
from archon.rl.workflows.grouping import GroupedWorkflow
from archon.schema.errors import ConfigError, RolloutError, UserError
from archon.schema.user_code import is_ended, user_code

REPORT_SECONDS = 10.0
"""Seconds between two lines on the progress of an evaluation."""

MAX_INITIAL_FAILURES = 16
"""The run stops after this many failed episodes before the first success."""

TRAIN_STREAM, EVAL_STREAM = 0, 1


class WorkflowError(RuntimeError):
    """A workflow failed on every prompt; the first failure is the cause."""


class WorkflowRefusedError(WorkflowError, UserError):
    """A user's mistake made a workflow fail on every prompt; the message needs no traceback."""


@dataclass
class RolloutBatch:
    """Groups of one step, in prompt order.

    Attributes:
        trajectories: [B, S] and [B] tensors with `group_ids` and `trajectory_ids` int64 [B]; empty without groups.
        prompts: the prompt of each group.
        counts: counts of prompts, episodes, dropped samples and failures.
        numbers: means of the values that workflows recorded.
        reward: mean over all answers of the step, including dropped groups; None if unknown.
        dropped: all groups, if zero variance dropped every one.
    """

    trajectories: dict[str, Any] = field(default_factory=dict, repr=False)
    prompts: list[Prompt] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    numbers: dict[str, float] = field(default_factory=dict)
    reward: float | None = None
    dropped: RolloutBatch | None = field(default=None, repr=False)

    @classmethod
    def from_episodes(cls, episodes: Sequence[Episode], counts: Counter[str] | None = None) -> RolloutBatch:
        """Return the batch of the episodes that have trajectories."""
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
        """Return whether every token with a known version was sampled with the weights of `version`."""
        versions = self.trajectories["versions"]
        return bool(((versions < 0) | (versions == version)).all())


class Rollout:
    """Runner of one workflow's episodes against one generator.

    Args:
        engine: the generator.
        workflow: turns a row into trajectories.
        seed: every random stream derives from (seed, stream, step, prompt index, request number).
        n_samples: group size for workflows that return single trajectories; None: `gconfig.n_samples`.
        check: raises for sampling parameters if the trainer cannot recompute their logprobs.
        accept: filter of a training group's tensors; False replaces the group like `resample` does. It must be
            deterministic: every process calls it for all groups.
        rule: which groups are trained; a function of the prompt if that depends on it.
        agent_sampling: policy for the sampling parameters of agents' requests in training.
        world: the processes that split the episodes of `run`; None: all processes.
        log: called once per step and kind of dropped sample or failed episode.
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
        rule: GroupRule | Callable[[Prompt], GroupRule] | None = None,
        agent_sampling: SamplingPolicy | None = None,
        world: ControlPlane | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        self.engine = engine
        self.workflow = workflow
        gconfig = getattr(workflow, "gconfig", None)
        n_samples = n_samples if n_samples is not None else getattr(gconfig, "n_samples", 1)
        self._name = type(workflow).__name__
        self._grouped = GroupedWorkflow(workflow, n_samples, log)
        self._seed = seed
        self._check, self._agent_sampling = check, agent_sampling
        self._accept = accept
        self._rule = rule or GroupRule()
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
        max_resamples: int = 0,
    ) -> RolloutBatch:
        """Return one training batch of up to `n_prompts` groups.

        Args:
            take: returns the next n prompts of the data stream, or fewer at its end.
            n_prompts: the number of groups.
            step: the trainer's step, which seeds random streams.
            max_resamples: maximum number of extra rounds.
        """
        counts, kept, episodes = Counter[str](), list[Episode](), list[Episode]()
        missing = n_prompts
        for round_ in range(max_resamples + 1):
            prompts = take(missing)
            counts["resampled" if round_ else "prompts"] += len(prompts)
            ended = await self.run(prompts, step)
            kept += [e for e in ended if e.is_trainable(self.rule_of(e.prompt))]
            episodes += ended
            missing = sum(self._is_replaced(e) for e in ended)
            if not missing:
                break
        return self.make_batch(kept, episodes, counts, step)

    def rule_of(self, prompt: Prompt) -> GroupRule:
        """Return the rule for the groups of a prompt."""
        return self._rule if isinstance(self._rule, GroupRule) else self._rule(prompt)

    def _is_replaced(self, episode: Episode) -> bool:
        """Return whether another prompt takes the place of an episode."""
        rule = self.rule_of(episode.prompt)
        return not episode.is_trainable(rule) and (rule.zero_variance == "resample" or self._accept is not None)

    def make_batch(
        self, kept: Sequence[Episode], episodes: Sequence[Episode], counts: Counter[str], step: int
    ) -> RolloutBatch:
        """Return the batch of the `kept` episodes; raise like `raise_if_empty` for all `episodes`."""
        self.raise_if_empty(episodes)
        batch = RolloutBatch.from_episodes(kept, counts)
        if not batch:
            batch.dropped = RolloutBatch.from_episodes(episodes)
        self._count_and_log(batch, episodes, step)
        return batch

    async def run(self, prompts: Sequence[Prompt], step: int = 0, *, is_eval: bool = False) -> list[Episode]:
        """Run one episode per prompt concurrently, and return them in prompt order.

        The processes split the prompts, and every process receives all episodes. Every `REPORT_SECONDS` of an
        evaluation, the first process logs how many prompts it has finished.

        Raises:
            WorkflowError: `MAX_INITIAL_FAILURES` episodes failed before any succeeded; its cause is the first failure.
        """
        # 1. Run the episodes of this rank.
        episodes = [self._new_episode(prompt, step, is_eval) for prompt in prompts]
        world = self._world or ControlPlane.with_long_timeout("rollouts")
        local = range(world.rank, len(prompts), world.size)
        tasks = [asyncio.create_task(self._run_episode(episodes[index])) for index in local]
        report = asyncio.create_task(self._report(tasks)) if is_eval and world.rank == 0 else None
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in filter(None, [*tasks, report]):
                task.cancel()
        # 2. Exchange the results.
        if world.size > 1:
            packed = world.all_gather(pack_episodes({index: episodes[index] for index in local}))
            for rank, data in enumerate(packed):
                if rank != world.rank:
                    unpack_episodes(data, episodes)
        if not is_eval:
            self._filter(episodes)
        return episodes

    async def _report(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Log the number of finished episodes until canceled."""
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self._log(f"evaluation: {sum(task.done() for task in tasks)} of {len(tasks)} prompts")

    async def run_one(self, prompt: Prompt, step: int) -> Episode:
        """Run one training episode and return it. Raises like `run`."""
        episode = self._new_episode(prompt, step, is_eval=False)
        await self._run_episode(episode)
        self._filter([episode])
        return episode

    def _filter(self, episodes: Sequence[Episode]) -> None:
        """Mark episodes if the filter rejects their group."""
        for episode in episodes:
            if self._accept is not None and episode.trajectories:
                with user_code("dynamic_filter_fn"):
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
        except (ConfigError, KeyboardInterrupt):
            raise  # a configuration mistake hits every prompt
        except BaseException as error:  # any exception of user code costs its episode only
            if is_ended(error):
                raise  # this task is canceled, not something it awaits
            episode.error = error
            self._first_error = self._first_error or error
            self._failures += 1
            if not self._succeeded and self._failures >= MAX_INITIAL_FAILURES:
                raise self._workflow_error(self._failures, self._first_error) from self._first_error
        else:
            self._succeeded = True

    def raise_if_empty(self, episodes: Sequence[Episode]) -> None:
        """Raise if no episode has a trajectory: `WorkflowError` if any failed, else `RolloutError`."""
        failed = [e.error for e in episodes if e.error]
        if any(e.trajectories for e in episodes):
            return
        if failed:
            raise self._workflow_error(len(failed), failed[0]) from failed[0]
        if episodes:
            raise RolloutError(
                f"{self._name} rejected all {len(episodes)} prompts of a step (returned None); "
                "return trajectories for some of them"
            )

    def _workflow_error(self, n: int, first: BaseException) -> WorkflowError:
        failed = f"{self._name} failed on {n} prompts and succeeded on none; the first failure"
        if is_one_line(first):
            return WorkflowRefusedError(f"{failed}: {first}")
        return WorkflowError(f"{failed} (traceback above): {error_kind(first)}: {first}")

    def _count_and_log(self, batch: RolloutBatch, episodes: Sequence[Episode], step: int) -> None:
        """Set the batch's counts, and log one line per kind of failure with its first error."""
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
            if episode.trajectories and episode.has_zero_variance(self.rule_of(episode.prompt)):
                batch.counts["zero_variance_groups"] += 1
            if episode.filtered:
                batch.counts["filtered_groups"] += 1
        batch.counts["episodes"] = len(episodes)
        batch.numbers = recorded_means(episodes)
        rewards = [reward for episode in episodes for reward in episode.rewards.tolist()]
        batch.reward = sum(rewards) / len(rewards) if rewards else None
        for name, error in first.items():
            event = "samples dropped" if name.startswith("dropped/") else "episodes failed"
            self._log(f"step {step}: {batch.counts[name]} {event} ({name.partition('/')[2]}): {error}")


def recorded_means(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the mean over all episodes of each recorded name."""
    numbers: defaultdict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        for name, values in episode.context.numbers.items():
            numbers[name] += values
    return {name: sum(values) / len(values) for name, values in numbers.items()}
