"""Workflow whose user is an environment: text observation in, action out, the reward at the end."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from archon.data import encode_prompt
from archon.data.encoding import plain_prompt
from archon.data.environments import environment_function, parse_environment
from archon.generation.record import TokenRecord, UnusableAnswerError
from archon.generation.types import GenerationHyperparameters, InferenceEngine, ModelResponse
from archon.rl.episode_context import workflow_context
from archon.rl.trajectories import trajectory_tensors
from archon.rl.workflows.base import SamplingWorkflow, drop_failed_samples
from archon.rl.workflows.conversation import converse
from archon.schema.errors import ConfigError, UserError
from archon.schema.lazy import import_dotted


class Step(NamedTuple):
    """What an action leads to: the next observation, the reward of this step, and whether the episode is over."""

    observation: str
    reward: float = 0.0
    done: bool = False


class TextEnvironment(Protocol):
    """An environment of text. Its methods may be `async`; one that has `close` is closed after its episode."""

    def reset(self, seed: int) -> Any:
        """Begin an episode, the same one for the same seed, and returns the first observation."""
        ...

    def step(self, action: str) -> Any:
        """Return the `Step`, or a tuple of its three values, that an action leads to."""
        ...


class EnvironmentWorkflow(SamplingWorkflow):
    """Plays the row's episode `gconfig.n_samples` times, each time in an environment of its own; all form one group.

    An observation is the user's message, the model's answer the action. The reward of a sample is the sum of those of
    its steps. All answers are trained, and nothing else. The row's `seed` says which episode it is. An environment that
    raises costs its sample, which is counted as `environment_failed`.

    Args:
        gconfig: sampling parameters of each turn; `max_tokens` limits the conversation.
        tokenizer: renders prompts and observations; its end-of-text and padding ids stop an answer.
        environment: a name, such as `textarena:Mastermind-v0`; or a function that makes a `TextEnvironment`, its class,
            or the dotted path of either.
        max_turns: the maximal number of answers; an episode that is not over then keeps the rewards so far.
        system_prompt: a system message before the first observation.
        max_concurrent: the maximal number of environments at once; None: no limit.
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
        self._places = asyncio.Semaphore(max_concurrent or 1_000_000)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Tensor] | None:
        """Return one group of conversations as trajectory tensors [n, S]; `turn_ids` is the turn of each token.

        Samples that fail are dropped and counted by kind; the first failure is raised when none is left.
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
                f"the row's seed is {seed!r}, expected the number of an episode of {self.name}; set train_data.path "
                "(and eval_data.path) to the environment's name, or to rows with a column `seed`"
            )
        named = data.get("environment", self.name)
        if parse_environment(self.name) and _task(named) != _task(self.name):
            raise ConfigError(f"the row is of {named}, and workflow is {self.name}; set both to the same environment")
        return seed

    async def _play(self, engine: InferenceEngine, record: TokenRecord, seed: int, index: int) -> tuple[float, bool]:
        """Fill `record`. Returns the sum of the rewards, and whether the episode is over."""
        total, done = 0.0, False
        async with self._places:
            environment = await self._call_environment(self.open)

            async def act(action: str, response: ModelResponse) -> str | None:
                nonlocal total, done
                observation, reward, done = await self._call_environment(environment.step, action)
                total += float(reward)
                return None if done or record.turns == self.max_turns else str(observation)

            try:
                prompt_ids = self._prompt_ids(await self._call_environment(environment.reset, seed))
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
        """Return what a method of the environment returns; what it raises costs the sample."""
        try:
            returned = function(*arguments)
            return await returned if inspect.isawaitable(returned) else returned
        except UserError:
            raise
        except Exception as error:
            what = f"the environment {self.name} raised {type(error).__name__}: {error}"
            raise UnusableAnswerError("environment_failed", what) from error


def environment_reward(name: str) -> Callable[..., float]:
    """Return the reward function that stands for an environment's own rewards, and refuses to be called."""
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
