"""`RolloutWorkflow`, the base class of workflows, and helpers of the built-in ones."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar

from archon.checkpoint.tokenizer import load_tokenizer
from archon.generation.record import UnusableAnswerError
from archon.generation.types import GenerationHyperparameters, InferenceEngine
from archon.rl.episode_context import workflow_context
from archon.rl.rewards import AsyncRewardWrapper, Reward, RewardFailure
from archon.rl.rewards.result import REWARD_PART
from archon.schema.errors import ConfigError

Sample = TypeVar("Sample")
Result = TypeVar("Result")
Failure: TypeAlias = RewardFailure | UnusableAnswerError


class RolloutWorkflow(ABC):
    """Base class: turns one prompt into scored trajectories.

    Give the trainer an instance of a subclass, the class, or `"pkg.mod.Class"`. The trainer passes `reward_fn`,
    `gconfig` and `tokenizer` to a class if its `__init__` names them.

    A group is `gconfig.n_samples` trajectories of one prompt.

    Attributes:
        returns_group: True: a run returns the whole group. False: a run returns one trajectory; each prompt gets n
            concurrent runs, and a rejected or failed run costs one sample. None: unknown; one run, then n − 1 more if
            it returned a single trajectory.
        reads_raw_rows: whether rows must include the source dataset's columns, as with `train_data.raw`.
    """

    returns_group: ClassVar[bool | None] = None
    reads_raw_rows: ClassVar[bool] = False

    @abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """Run one episode.

        Args:
            engine: the generator; call `await engine.agenerate(ModelRequest(...))`.
            data: a copy of one dataset row.

        Returns:
            Batch-first trajectory tensors: `input_ids` int [B, S], `attention_mask` bool [B, S], `loss_mask` int [B,
            S], `logprobs` float [B, S] (0 on prompt tokens), `versions` int [B, S] (−1 on prompt and padding),
            `rewards` float [B], and anything else with a leading B. All rows form one group. `None` rejects the
            episode.

            Short forms: `input_ids` (the prompt) and `output_ids` (the engine's answer), both int [L] or [1, L], with
            `reward`; a list of these; or a dictionary of `InteractionWithTokenLogpReward` by id: parts of one
            trajectory, or one trajectory each if `returns_group` is True.
        """

    async def aclose(self) -> None:  # noqa: B027 (optional)
        """Release resources; a run awaits it at its end on the event loop of the episodes."""

    def with_gconfig(self, gconfig: GenerationHyperparameters) -> RolloutWorkflow:
        """Return a copy that samples with `gconfig`; raise `ConfigError` without a `gconfig` attribute."""
        if not hasattr(self, "gconfig"):
            raise ConfigError(
                f"{type(self).__name__} has no attribute `gconfig`, which evaluation must change; keep the "
                "constructor's gconfig in self.gconfig, override with_gconfig, or pass eval_workflow"
            )
        changed = copy.copy(self)
        changed.gconfig = gconfig
        return changed


class SamplingWorkflow(RolloutWorkflow):
    """Base class of workflows that return whole groups, sampled with `gconfig`.

    `tokenizer` is a tokenizer or its folder; its end-of-text and padding ids stop an answer.
    """

    returns_group = True

    def __init__(self, gconfig: GenerationHyperparameters, tokenizer: Any) -> None:
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(self.tokenizer)

    def with_gconfig(self, gconfig: GenerationHyperparameters) -> RolloutWorkflow:
        """Return a copy that samples with `gconfig` and the tokenizer's stop ids."""
        return super().with_gconfig(gconfig.new_with_stop_and_pad_token_ids(self.tokenizer))


def count_failure(error: Failure) -> None:
    """Count a dropped sample, unless `error` was already counted."""
    if all(error is not known for known in workflow_context.get().first_errors.values()):
        workflow_context.drop(f"reward_{error.kind}" if isinstance(error, RewardFailure) else error.kind, error)


def split_outcomes(outcomes: Sequence[Result | BaseException]) -> tuple[list[tuple[int, Result]], list[Failure]]:
    """Split outcomes into results with their index, and failures, which are counted.

    Any exception other than a failed reward or an unusable answer is raised.
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
    """Return the result or the exception of `work`, like `asyncio.gather(return_exceptions=True)`."""
    try:
        return await work
    except Exception as error:  # noqa: BLE001 - the caller handles it
        return error


def drop_failed_samples(
    samples: Sequence[Sample], outcomes: Sequence[Result | BaseException]
) -> list[tuple[Sample, Result]]:
    """Return successful samples with their outcomes; raise the first failure if none succeeded."""
    results, failures = split_outcomes(outcomes)
    if not results:
        raise failures[0]
    return [(samples[index], result) for index, result in results]


def wrap_reward(reward_fn: Callable[..., Any] | str | AsyncRewardWrapper) -> AsyncRewardWrapper:
    """Wrap a reward function; raise `RewardError` unless it takes the four documented arguments."""
    wrapper = AsyncRewardWrapper(reward_fn)
    wrapper.require_documented_form()
    return wrapper


def record_reward_parts(rewards: Iterable[Reward]) -> None:
    """Add the parts of the rewards to the step's metrics."""
    for reward in rewards:
        workflow_context.record(**{f"{REWARD_PART}{name}": part for name, part in reward.parts.items()})
