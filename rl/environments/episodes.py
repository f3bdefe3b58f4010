"""Workflow for text environments: observation in, action out, rewards per step."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from archon.data import encode_prompt
from archon.data.encoding import plain_prompt
from archon.data.environments import environment_function, parse_environment
from archon.generation.record import TokenRecord, UnusableAnswerError
from archon.generation.types import GenerationHyperparameters, InferenceEngine, ModelResponse
from archon.remote.http import ServerError
from archon.rl.episode_context import workflow_context
from archon.rl.trajectories import trajectory_tensors
from archon.rl.workflows.base import SamplingWorkflow, drop_failed_samples
from archon.rl.workflows.conversation import converse
from archon.schema.errors import ConfigError, UserError
from archon.schema.lazy import import_dotted

MAX_CHARACTERS = 2**20
"""Maximum characters of an observation: more than the context of any model; a tokenizer needs a second for them."""
MAX_REWARD = 1e30
"""Maximum size of a step's reward: no sum of an episode's rewards leaves the range of float32, 3.4e38."""


class Step(NamedTuple):
    """Result of an action: next observation, reward of the step, and whether the episode is over."""

    observation: str
    reward: float = 0.0
    done: bool = False


class TextEnvironment(Protocol):
    """Text environment. Its methods may be `async`; an optional `close` is called after the episode."""

    def reset(self, seed: int) -> Any:
        """Begin the episode of `seed` and return the first observation."""
        ...

    def step(self, action: str) -> Any:
        """Apply an action and return a `Step` or a tuple of its three values."""
        ...


class EnvironmentWorkflow(SamplingWorkflow):
    """Workflow that plays the row's episode `gconfig.n_samples` times in separate environments.

    The observation is the user's message, and the model's answer is the action. The reward of a sample is the sum of
    its step rewards. Only answers are trained. The row's `seed` selects the episode. A failing environment costs its
    sample and is counted as `environment_failed`.

    Args:
        gconfig: sampling parameters of each turn; `max_tokens` limits the conversation.
        tokenizer: renders prompts and observations; its end-of-text and padding ids stop an answer.
        environment: a name such as `textarena:Mastermind-v0`, a function that makes a `TextEnvironment`, its class, or
            the dotted path of either.
        max_turns: maximum number of answers; an unfinished episode keeps its rewards.
        system_prompt: system message before the first observation.
        max_concurrent: maximum number of concurrent environments; None: no limit.
    """

    def __init__(
        self,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        environment: str | Callable[[], TextEnvironment],
        max_turns: int = 30,
        system_prompt: str | None = None,
        max_concurrent: int | None = None,
    ) -> None:
        if max_turns < 1 or (max_concurrent is not None and max_concurrent < 1):
            raise ConfigError(f"max_turns = {max_turns} and max_concurrent = {max_concurrent} must be at least 1")
        super().__init__(gconfig, tokenizer)
        self.name = environment if isinstance(environment, str) else getattr(environment, "__qualname__", "environment")
        self.open = _opener(environment)
        self.max_turns = max_turns
        self.system_prompt = system_prompt
        self._slots = asyncio.Semaphore(max_concurrent or 1_000_000)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor] | None:
        """Return one group of conversations as trajectory tensors [n, S]; `turn_ids` is the turn of each token.

        Failed samples are dropped and counted by kind. If all fail, the first failure is raised.
        """
        seed = self._episode_seed(data)
        records = [TokenRecord() for _ in range(self.gconfig.n_samples)]
        played = (self._play(engine, record, seed, index) for index, record in enumerate(records))
        kept = drop_failed_samples(records, await asyncio.gather(*played, return_exceptions=True))
        for record, (_, done) in kept:
            workflow_context.record(turns=record.turns, unfinished=not done)
        return trajectory_tensors([record for record, _ in kept], [reward for _, (reward, _) in kept])

    def _episode_seed(self, data: dict[str, Any]) -> int:
        seed = data.get("seed")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigError(
                f"the row's seed is {seed!r}, expected an integer that selects an episode of {self.name}; set "
                "train_data.path (and eval_data.path) to the environment's name, or to rows with a column `seed`"
            )
        named = data.get("environment", self.name)
        if parse_environment(self.name) and _task(named) != _task(self.name):
            raise ConfigError(f"the row is for {named}, but workflow is {self.name}; set both to the same environment")
        return seed

    async def _play(self, engine: InferenceEngine, record: TokenRecord, seed: int, index: int) -> tuple[float, bool]:
        """Fill `record`. Return the sum of rewards and whether the episode is over."""
        total, done = 0.0, False
        async with self._slots:
            environment = await self._call_environment(self.open)

            async def act(action: str, response: ModelResponse) -> str | None:
                nonlocal total, done
                step = self._checked_step(await self._call_environment(environment.step, action))
                total, done = total + step.reward, step.done
                return None if done or record.turns == self.max_turns else step.observation

            try:
                first = self._checked_text(await self._call_environment(environment.reset, seed))
                prompt_ids = self._prompt_ids(first)
                await converse(engine, record, prompt_ids, index, act, self.gconfig, self.tokenizer)
            finally:
                if hasattr(environment, "close"):
                    await self._call_environment(environment.close)
        return total, done

    def _prompt_ids(self, observation: str) -> list[int]:
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        messages = [*system, {"role": "user", "content": observation}]
        return encode_prompt(self.tokenizer, {"messages": messages, "prompt": plain_prompt(messages)})

    async def _call_environment(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the environment; an exception costs the sample."""
        try:
            returned = function(*arguments)
            return await returned if inspect.isawaitable(returned) else returned
        except ServerError as error:
            raise self._failure(f"failed: {error}") from error
        except UserError:
            raise
        except Exception as error:
            raise self._failure(f"raised {type(error).__name__}: {error}") from error

    def _checked_step(self, result: Any) -> Step:
        """Return the result of a step, whose three values are checked before anything uses them."""
        try:
            observation, reward, done = result
        except (TypeError, ValueError):
            raise self._failure(
                f"returned a {type(result).__name__} from its step; expected (observation, reward, done)"
            ) from None
        try:
            number = float(reward)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not abs(number) <= MAX_REWARD:
            raise self._failure(
                f"returned the reward {number:g} ({type(reward).__name__}); expected a finite number of at most "
                f"{MAX_REWARD:g}"
            )
        return Step(self._checked_text(observation), number, bool(done))

    def _checked_text(self, observation: Any) -> str:
        """Return an observation as text that a tokenizer reads within a second."""
        text = str(observation)
        if len(text) > MAX_CHARACTERS:
            raise self._failure(
                f"returned an observation of {len(text):,} characters; expected at most {MAX_CHARACTERS:,}"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise self._failure(
                f"returned an observation with half of a surrogate pair at character {error.start}, which is no text"
            ) from None
        return text

    def _failure(self, problem: str) -> UnusableAnswerError:
        """Return the error that costs this sample only."""
        return UnusableAnswerError("environment_failed", f"the environment {self.name} {problem}")


def environment_reward(name: str) -> Callable[..., float]:
    """Return a placeholder reward that raises, because the environment scores its episodes."""
    return _EnvironmentReward(name)


class _EnvironmentReward:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, prompt: Any, completions: Any, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
        raise ConfigError(
            f"the reward {self.name}: the environment scores its own episodes; set workflow to {self.name}, and leave "
            "reward out"
        )


def _opener(environment: Any) -> Callable[[], TextEnvironment]:
    if isinstance(environment, str):
        name = parse_environment(environment)
        if name is not None:
            opened: Callable[[], TextEnvironment] = environment_function(name, "make_environment")(name)
            return opened
        environment = import_dotted(environment, "environment")
    if not callable(environment):
        raise ConfigError(f"environment: got {environment!r}, expected a name, or a function that makes an environment")
    made: Callable[[], TextEnvironment] = environment
    return made


def _task(text: str) -> str:
    return text.partition("?")[0]
