"""`RolloutWorkflow`, the base class of workflows, and what the built-in ones share."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar

from archon.checkpoint.hf_io import load_tokenizer
from archon.generation.record import UnusableAnswerError
from archon.generation.types import GenerationHyperparameters, InferenceEngine
from archon.rl.episode_context import workflow_context
from archon.rl.rewards import AsyncRewardWrapper, Reward, RewardFailure
from archon.schema.errors import ConfigError

Sample = TypeVar("Sample")
Result = TypeVar("Result")
Failure: TypeAlias = RewardFailure | UnusableAnswerError


class RolloutWorkflow(ABC):
    """Turns one prompt into scored trajectories.

    Give the trainer an instance of a subclass, the class, or `"pkg.mod.Class"`. A class is constructed with those of
    `reward_fn`, `gconfig` and `tokenizer` that its `__init__` names.

    A run returns a group: `gconfig.n_samples` trajectories of one prompt, as tensors. Workflows written for AReaL may
    return single trajectories, which `archon.rl.compat.areal` groups. For these `returns_group` says what a run
    returns. True: the whole group. False: one trajectory, so that each prompt gets n concurrent runs, and a run that
    rejects its answer or whose reward fails costs that sample only. None: not known; one run, and n − 1 more where it
    returned a single trajectory.

    `reads_raw_rows` says that rows need their source's own row, which the trainer then adds as `train_data.raw` does.
    """

    returns_group: ClassVar[bool | None] = None
    reads_raw_rows: ClassVar[bool] = False

    @abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """Run one episode.

        Args:
            engine: the generator, called as `await engine.agenerate(ModelRequest(...))`.
            data: a copy of one row of the dataset.

        Returns:
            Trajectory tensors, batch first: `input_ids` int [B, S], `attention_mask` bool [B, S], `loss_mask` int [B,
            S], `logprobs` float [B, S] (0 on prompt tokens), `versions` int [B, S] (−1 on prompt and padding),
            `rewards` float [B], and anything else with a leading B. All rows answer the same prompt and form one group.
            `None` rejects the episode.

            Short forms are accepted too: `input_ids` (the prompt), `output_ids` (the answer as the engine returned it),
            both int [L] or [1, L], and `reward`; a list of these; or a dictionary of `InteractionWithTokenLogpReward`
            by id, the parts of one trajectory (one trajectory each where `returns_group` is True).
        """

    async def aclose(self) -> None:  # noqa: B027 (most hold nothing)
        """Release what the workflow holds; a run awaits it at its end, on the event loop of the episodes."""

    def with_gconfig(self, gconfig: GenerationHyperparameters) -> RolloutWorkflow:
        """Return a copy that samples with `gconfig`. Raises `ConfigError` where the workflow has no such attribute."""
        if not hasattr(self, "gconfig"):
            raise ConfigError(
                f"{type(self).__name__} has no attribute `gconfig`, so it cannot be evaluated with other sampling "
                "values; keep the constructor's gconfig in self.gconfig, override with_gconfig, or pass eval_workflow"
            )
        changed = copy.copy(self)
        changed.gconfig = gconfig
        return changed


class SamplingWorkflow(RolloutWorkflow):
    """A workflow whose runs return whole groups, sampled with `gconfig` from prompts that `tokenizer` renders.

    The tokenizer's end-of-text and padding ids stop an answer; a path is that of its folder.
    """

    returns_group = True

    def __init__(self, gconfig: GenerationHyperparameters, tokenizer: Any) -> None:
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(self.tokenizer)

    def with_gconfig(self, gconfig: GenerationHyperparameters) -> RolloutWorkflow:
        return super().with_gconfig(gconfig.new_with_stop_and_pad_token_ids(self.tokenizer))


def count_failure(error: Failure) -> None:
    """Count the sample that `error` costs, unless it was counted before."""
    if all(error is not known for known in workflow_context.get().first_errors.values()):
        workflow_context.drop(f"reward_{error.kind}" if isinstance(error, RewardFailure) else error.kind, error)


def split_outcomes(outcomes: Sequence[Result | BaseException]) -> tuple[list[tuple[int, Result]], list[Failure]]:
    """Split what samples or runs ended with into results, each with its index, and failures, which are counted.

    Raises any exception that is neither a failed reward nor an unusable answer.
    """
    results: list[tuple[int, Result]] = []
    failures: list[Failure] = []
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, Failure):
            count_failure(outcome)
            failures.append(outcome)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            results.append((index, outcome))
    return results, failures


async def capture_outcome(work: Awaitable[Result]) -> Result | BaseException:
    """Return what `work` returns or raises, as `asyncio.gather` does of tasks."""
    try:
        return await work
    except Exception as error:  # noqa: BLE001 - the caller's to judge
        return error


def drop_failed_samples(
    samples: Sequence[Sample], outcomes: Sequence[Result | BaseException]
) -> list[tuple[Sample, Result]]:
    """Return the samples that did not fail, each with its outcome; raises the first failure where none is left."""
    results, failures = split_outcomes(outcomes)
    if not results:
        raise failures[0]
    return [(samples[index], result) for index, result in results]


def wrap_reward(reward_fn: Callable[..., Any] | str | AsyncRewardWrapper) -> AsyncRewardWrapper:
    """Return the wrapper of a reward function, which must take the four documented arguments, else `RewardError`."""
    wrapper = AsyncRewardWrapper(reward_fn)
    wrapper.require_documented_form()
    return wrapper


def record_reward_parts(rewards: Iterable[Reward]) -> None:
    """Add the parts of the rewards to the step's metrics."""
    for reward in rewards:
        workflow_context.record(**{f"reward/{name}": part for name, part in reward.parts.items()})
