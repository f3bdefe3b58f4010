"""The contract of a workflow, and the forms in which one may be given to a trainer."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeVar

from archon.generation.record import UnusableAnswerError
from archon.generation.types import GenerationHyperparameters, InferenceEngine
from archon.rl.episode_context import workflow_context
from archon.rl.rewards import AsyncRewardWrapper, Reward, RewardFailure
from archon.schema.errors import ConfigError

Sample = TypeVar("Sample")


class RolloutWorkflow(ABC):
    """One prompt in, scored trajectories out.

    Subclass it, and give the trainer an instance, the class, or `"pkg.mod.Class"`. A class is constructed with those of
    `reward_fn`, `gconfig` and `tokenizer` that its `__init__` names.

    One run returns a whole group, `gconfig.n_samples` trajectories of one prompt, as tensors. Workflows written for
    AReaL may return less, which `archon.rl.compat.areal` makes a group of; for these `returns_group` says what a run
    returns. True: the whole group. False: one trajectory, and a prompt has n runs at once; one that rejects its answer,
    or whose reward failed, costs that sample. None: one run, and n − 1 more where it returned a single trajectory.
    """

    returns_group: ClassVar[bool | None] = None

    @abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """Run one episode.

        Args:
            engine: answers requests; `await engine.agenerate(ModelRequest(...))`.
            data: one row of the dataset, in a copy of this run's own.

        Returns:
            Trajectory tensors, batch first: `input_ids` int [B, S], `attention_mask` bool [B, S], `loss_mask` int [B,
            S], `logprobs` float [B, S] (0 on prompt tokens), `versions` int [B, S] (−1 on prompt and padding),
            `rewards` float [B], and anything else with a leading B. All rows answer the same prompt and form one group.
            `None` rejects the episode.

            Short forms of one answer as the engine gave it are accepted too: `input_ids` (the prompt's) and
            `output_ids`, int [L] or [1, L], and `reward`; a list of such dictionaries; or a dictionary of
            `InteractionWithTokenLogpReward` by id, the parts of one trajectory (each a trajectory where `returns_group`
            is True).
        """

    def with_gconfig(self, gconfig: GenerationHyperparameters) -> RolloutWorkflow:
        """Returns a copy that samples with `gconfig`, for evaluation. Raises `ConfigError` without that attribute."""
        if not hasattr(self, "gconfig"):
            raise ConfigError(
                f"{type(self).__name__} has no attribute `gconfig`, so it cannot be evaluated with other sampling "
                "values; keep the constructor's gconfig in self.gconfig, override with_gconfig, or pass eval_workflow"
            )
        changed = copy.copy(self)
        changed.gconfig = gconfig
        return changed


def count_failure(error: RewardFailure | UnusableAnswerError) -> None:
    """Count the sample that `error` costs, unless it has been counted."""
    if all(error is not known for known in workflow_context.get().first_errors.values()):
        workflow_context.drop(f"reward_{error.kind}" if isinstance(error, RewardFailure) else error.kind, error)


def kept_samples(samples: Sequence[Sample], outcomes: Sequence[Reward | BaseException]) -> list[tuple[Sample, Reward]]:
    """Returns the samples that have a reward, with it; those whose answer or reward failed are counted by kind.

    Raises any other exception among `outcomes`, and the first failure where no sample is left.
    """
    kept: list[tuple[Sample, Reward]] = []
    for sample, outcome in zip(samples, outcomes, strict=True):
        if isinstance(outcome, RewardFailure | UnusableAnswerError):
            count_failure(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            kept.append((sample, outcome))
    if not kept:
        raise next(outcome for outcome in outcomes if isinstance(outcome, BaseException))
    return kept


def wrapped_reward(reward_fn: Callable[..., Any] | str | AsyncRewardWrapper) -> AsyncRewardWrapper:
    """Returns a wrapper of a reward given as a function, its name, its dotted path or a wrapper.

    Raises `RewardError` for one that does not take the four documented arguments.
    """
    wrapper = AsyncRewardWrapper(reward_fn)
    wrapper.require_documented_form()
    return wrapper


def record_parts(rewards: Iterable[Reward]) -> None:
    """Add the parts of rewards that have several to the step's metrics."""
    for reward in rewards:
        workflow_context.record(**{f"reward/{name}": part for name, part in reward.parts.items()})
