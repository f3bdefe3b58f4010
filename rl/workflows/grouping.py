"""Groups of trajectories from workflows that return single trajectories or short forms."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from archon.generation.record import UnusableAnswerError
from archon.generation.seeds import derive_seed
from archon.generation.types import InferenceEngine
from archon.rl.episode_context import EpisodeEngine, workflow_context
from archon.rl.trajectories import join_groups, require_usable_tensors, trajectory_ids, validate_group
from archon.rl.workflow_row import copy_containers
from archon.rl.workflows.base import RolloutWorkflow, count_failure, split_outcomes
from archon.rl.workflows.short_forms import SHORT_FORM, expand_short_form
from archon.schema.errors import RolloutError
from archon.schema.user_code import CONTAINED, raise_in_one_line


class GroupedWorkflow(RolloutWorkflow):
    """Workflow that returns a group per prompt, from one or more runs of the user's workflow.

    `RolloutWorkflow.returns_group` determines the number of runs per prompt.

    Args:
        workflow: the user's workflow.
        n_samples: group size for single-trajectory runs.
        log: called once if a workflow without `returns_group` is run several times per prompt.
    """

    returns_group = True

    def __init__(self, workflow: RolloutWorkflow, n_samples: int, log: Callable[[str], None]) -> None:
        self._workflow = workflow
        self._name = type(workflow).__name__
        self._returns_group: bool | None = getattr(workflow, "returns_group", None)
        self._n_samples = n_samples
        self._log = log
        self._logged = False

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """Return one group as trajectory tensors, or None for a rejected prompt.

        A run that returns None, has an unusable answer or a failed reward costs its sample and is counted. If no run is
        left, the first failure is raised; any other exception is raised at once.
        """
        if self._returns_group:
            return (await self._run(engine, data))[0]
        samples: list[dict[str, Any]] = []
        if self._returns_group is None:
            first, is_single = await self._run(engine, copy_containers(data))
            if first is None or not is_single or self._n_samples == 1:
                return first
            samples.append(validate_group(first, workflow_context.get(), self._name))
            self._log_repeats()
        runs = range(len(samples), self._n_samples)
        outcomes = await asyncio.gather(
            *(self._sample(engine, copy_containers(data), run) for run in runs), return_exceptions=True
        )
        results, failures = split_outcomes(outcomes)
        for _, sample in results:
            if sample is None:
                count_failure(UnusableAnswerError("rejected_run", "a run of the workflow returned None"))
            else:
                samples.append(sample)
        if not samples and failures:
            raise failures[0]
        return joined(samples) if samples else None

    async def _sample(self, engine: InferenceEngine, data: dict[str, Any], run: int) -> dict[str, Any] | None:
        """Return the checked trajectory of run number `run`, or None; runs in its own task."""
        context = workflow_context.enter_sample(run)
        context.seed = derive_seed(context.seed, run, 0) if run else context.seed
        result, is_single = await self._run(engine, data)
        if result is None:
            return None
        checked = validate_group(result, context, self._name)
        if not is_single:
            raise RolloutError(
                f"{self._name}: one of several runs for a prompt returned several trajectories; return one, or set "
                "returns_group = True on the class and return the whole group"
            )
        return checked

    async def _run(self, engine: InferenceEngine, data: dict[str, Any]) -> tuple[Any, bool]:
        """Return the result of one run with short forms expanded, and whether it is a single trajectory."""
        run_engine = EpisodeEngine(engine, workflow_context.get())  # has its own seeds and responses
        try:
            result = await self._workflow.arun_episode(run_engine, data)
        except CONTAINED as left:
            raise_in_one_line(left, f"workflow {self._name}", in_task=True)
        require_usable_tensors(result, self._name, extra_fields=SHORT_FORM)
        separate = self._returns_group is True
        return expand_short_form(result, run_engine.responses, self._name, separate=separate), is_one_trajectory(result)

    def _log_repeats(self) -> None:
        if self._logged or workflow_context.get().is_eval:
            return
        self._logged = True
        self._log(
            f"{self._name} returned one trajectory, so each prompt is run {self._n_samples} times (gconfig.n_samples) "
            "for a group; with returns_group = False on the class all runs start at once, with True one trajectory is "
            "the whole group"
        )


def is_one_trajectory(result: Any) -> bool:
    """Return whether a run's result is a single trajectory; False for a malformed result."""
    if isinstance(result, list):
        return len(result) == 1
    if not isinstance(result, dict):
        return False
    if "attention_mask" not in result:  # a short form of one answer, or the parts of one trajectory
        return True
    ids = result.get("trajectory_ids")
    if isinstance(ids, Tensor):
        return len(ids.unique()) == 1
    rewards = result.get("rewards")
    return isinstance(rewards, Tensor) and rewards.numel() == 1


def joined(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the checked results of several runs on one prompt into one group."""
    parts, before = [], 0
    for sample in samples:
        ids = trajectory_ids(sample)
        parts.append({**sample, "trajectory_ids": before + ids})
        before += int(ids.max()) + 1
    return join_groups(parts)
