"""Trinity-style workflows, tasks and rewards, and their registries."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from archon.rl.algorithms.registry import Registry
from archon.rl.compat.trinity.experience import Experience
from archon.schema.config import nearest
from archon.schema.errors import ConfigError

if TYPE_CHECKING:
    from archon.rl.compat.trinity.model import ModelWrapper

T = TypeVar("T")


@dataclass
class FormatConfig:
    """Prompt and answer columns, and the system prompt (None: the default)."""

    prompt_key: str = "prompt"
    response_key: str = "response"
    system_prompt: str | None = None


@dataclass
class GenerationConfig:
    """Sampling parameters of a task's `n` answers.

    Temperature 0 is greedy, top_k −1 is off, and `max_tokens` limits an answer. Answers always have logprobs.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None
    logprobs: int = 0


@dataclass
class Task:
    """Input of one run of a workflow.

    `raw_task` is the unchanged dataset row. `reward_fn` is a `RewardFn` class or the run's archon reward. `task_id` is
    the position of the prompt in the data stream.
    """

    workflow: Any = None
    reward_fn: Any = None
    raw_task: dict[str, Any] = field(default_factory=dict)
    format_args: FormatConfig = field(default_factory=FormatConfig)
    rollout_args: GenerationConfig = field(default_factory=GenerationConfig)
    workflow_args: dict[str, Any] = field(default_factory=dict)
    reward_fn_args: dict[str, Any] = field(default_factory=dict)
    is_eval: bool = False
    task_id: int = 0

    @property
    def task_desc(self) -> Any:
        """Prompt, or None if the row lacks the column."""
        return self.raw_task.get(self.format_args.prompt_key)

    @property
    def truth(self) -> Any:
        """Gold answer, or None if the row lacks the column."""
        return self.raw_task.get(self.format_args.response_key)


class ModuleRegistry(Registry[T]):
    """Registry with the decorator `register_module`; a re-imported module may register its names again."""

    def register_module(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers an entry under `name`."""

        def add(entry: T) -> T:
            known: Any = self._entries.get(name)
            new: Any = entry
            if known is not None and (known.__module__, known.__qualname__) == (new.__module__, new.__qualname__):
                del self._entries[name]
            return self.register(name)(entry)

        return add


class RewardFn(ABC):
    """Reward class, constructed with `reward_fn_args` and called once per answer."""

    @abstractmethod
    def __call__(self, **kwargs: Any) -> float | dict[str, float]:
        """Return the reward of `response` for the gold answer `truth`, or a dictionary of parts to sum."""


class Workflow:
    """Workflow that turns a task into experiences; override `run`, or `run_async` with `is_async = True`.

    A synchronous `run` may block; it has a separate thread. The experiences of all runs of a task form one group, and
    each of several runs is one trajectory. `can_repeat` selects how a group of n is made:

    - True: one run after `set_repeat_times(n, …)`.
    - False: n concurrent runs.
    - None: one run that may read `task.rollout_args.n`, and n − 1 more if it returns a single experience.

    The older methods or properties `resettable`, `repeatable` and `asynchronous` work too.

    Attributes:
        auxiliary_models: OpenAI clients of the auxiliary models with `model_path`, asynchronous if `is_async`.
        auxiliary_model_wrappers: the same models; served checkpoints also have `chat` and `logprobs`.
    """

    can_reset: bool = False
    can_repeat: bool | None = None
    is_async: bool = False

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        self.task = task
        self.model = model
        self.auxiliary_model_wrappers = auxiliary_models
        client = "get_openai_async_client" if is_awaited(type(self)) else "get_openai_client"
        self.auxiliary_models: list[Any] = [getattr(wrapper, client)() for wrapper in auxiliary_models or []]
        self.logger = logging.getLogger(type(self).__module__)
        self.repeat_times, self.run_id_base = 1, 0

    def run(self) -> list[Experience]:
        """Return the experiences of the task; an empty list rejects it."""
        raise NotImplementedError

    async def run_async(self) -> list[Experience]:
        """Do the same as `run` on the event loop, without blocking it."""
        raise NotImplementedError

    def reset(self, task: Task) -> None:
        """Prepare a finished workflow for another task with the same model."""
        self.task = task

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Set the number of experiences that `run` returns."""
        self.repeat_times, self.run_id_base = repeat_times, run_id_base

    def process_messages_to_experience(
        self,
        messages: list[dict[str, Any]],
        reward: float,
        info: dict[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> Experience:
        """Return a conversation with this run's model as one experience; numbers in `info` are logged."""
        experience = self.model.convert_messages_to_experience(messages)
        experience.truncate_status = experience.truncate_status or truncate_status
        experience.reward, experience.info = reward, info or {}
        numbers = {name: float(value) for name, value in experience.info.items() if isinstance(value, int | float)}
        experience.metrics.update(numbers)
        return experience

    async def process_messages_to_experience_async(
        self,
        messages: list[dict[str, Any]],
        reward: float,
        info: dict[str, Any] | None = None,
        truncate_status: str | None = None,
    ) -> Experience:
        """Do the same as `process_messages_to_experience`, awaited."""
        return self.process_messages_to_experience(messages, reward, info, truncate_status)


def is_awaited(kind: type[Workflow]) -> bool:
    """Return whether workflows of this class run `run_async`."""
    if kind.run_async is Workflow.run_async:
        return False
    return kind.is_async or hasattr(kind, "asynchronous") or kind.run is Workflow.run


def declared_flag(workflow: Workflow, attribute: str, older: str) -> bool | None:
    """Return a class attribute, or the value of its older method or property."""
    value = getattr(workflow, older, None)
    if value is None:
        return getattr(workflow, attribute, None)
    return bool(value() if callable(value) else value)


def parse_workflow_args(name: str, args: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return `defaults` updated by the `workflow_args` of workflow `name`; raise `ConfigError` for unknown keys."""
    for key in args:
        if key not in defaults:
            raise ConfigError(f"workflow_args of {name}: unknown {key!r}{nearest(key, list(defaults))}")
    return defaults | args


WORKFLOWS: ModuleRegistry[type[Workflow]] = ModuleRegistry("workflow")
REWARD_FUNCTIONS: ModuleRegistry[type[RewardFn]] = ModuleRegistry("reward function")
