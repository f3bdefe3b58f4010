"""The base class of Trinity-style workflows, and the names that workflows and reward functions are registered under."""

from __future__ import annotations

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from archon.rl.algorithms.registry import Registry
from archon.rl.compat.trinity.types import Experience, Task
from archon.schema.config import nearest
from archon.schema.errors import ConfigError

if TYPE_CHECKING:
    from archon.rl.compat.trinity.model import ModelWrapper

T = TypeVar("T")


class ModuleRegistry(Registry[T]):
    """A registry whose decorator is called `register_module`. A class may be registered again by its own module, when
    that is imported a second time."""

    def register_module(self, name: str) -> Callable[[T], T]:
        def claim(entry: T) -> T:
            known = self._entries.get(name)
            if known is not None and _origin(known) == _origin(entry):
                del self._entries[name]
            return self.register(name)(entry)

        return claim

    def find(self, name: str) -> T:
        """The entry called `name`, or what the dotted path `name` leads to."""
        if name in self:
            return self[name]
        if "." not in name:
            raise ConfigError(
                f"unknown {self.kind} {name!r}{nearest(name, list(self))}; one of your own is named by its dotted path,"
                " such as my_package.my_module.Name"
            )
        module, _, attribute = name.rpartition(".")
        try:
            found: T = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"{self.kind} {name!r} cannot be imported ({error})") from error
        return found


def _origin(entry: Any) -> tuple[str, str]:
    return entry.__module__, entry.__qualname__


class RewardFn(ABC):
    """A reward as a class: made with `reward_fn_args`, called once an answer.

    Archon's own rewards, which run in processes of their own, are taken as well and survive more.
    """

    @abstractmethod
    def __call__(self, **kwargs: Any) -> float | dict[str, float]:
        """The reward of `response` (text) where `truth` is the gold answer; parts of a dictionary are summed."""


class Workflow:
    """One task in, experiences out. Overrides `run`, or `run_async` with `is_async = True`.

    A synchronous `run` has a thread of its own, where it may block. The experiences of all runs of a task are one
    group; of several runs those of one are parts of one trajectory. `can_repeat` says how a group of n comes
    about: True, one run that `set_repeat_times` has told n; False, n runs at once; not set, one run, which may read
    n in `task.rollout_args.n`, and n − 1 more of it where it returned a single experience.

    `resettable`, `repeatable` and `asynchronous`, as methods or properties, are understood too.
    """

    can_reset: bool = False
    can_repeat: bool | None = None
    is_async: bool = False

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        self.task = task
        self.model = model
        self.auxiliary_models = auxiliary_models
        self.logger = logging.getLogger(type(self).__module__)
        self.repeat_times, self.run_id_base = 1, 0

    def run(self) -> list[Experience]:
        """Work on the task; an empty list rejects it."""
        raise NotImplementedError

    async def run_async(self) -> list[Experience]:
        """As `run`, on the event loop, which it must not block."""
        raise NotImplementedError

    def reset(self, task: Task) -> None:
        """Make a finished workflow ready for another task; it keeps its model."""
        self.task = task

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Be told to return `repeat_times` experiences."""
        self.repeat_times, self.run_id_base = repeat_times, run_id_base

    def process_messages_to_experience(
        self, messages: list[dict[str, Any]], reward: float, info: dict[str, Any] | None = None
    ) -> Experience:
        """A conversation with this run's model as one experience; the numbers of `info` are logged."""
        experience = self.model.convert_messages_to_experience(messages)
        experience.reward, experience.info = reward, info or {}
        numbers = {name: float(value) for name, value in experience.info.items() if isinstance(value, int | float)}
        experience.metrics.update(numbers)
        return experience


def says(workflow: Workflow, attribute: str, older: str) -> bool | None:
    """What a workflow says of itself: by the class attribute, or by the method or property of older guides."""
    answer = getattr(workflow, older, None)
    if answer is None:
        return getattr(workflow, attribute, None)
    return bool(answer() if callable(answer) else answer)


WORKFLOWS: ModuleRegistry[type[Workflow]] = ModuleRegistry("workflow")
REWARD_FUNCTIONS: ModuleRegistry[type[RewardFn]] = ModuleRegistry("reward function")
