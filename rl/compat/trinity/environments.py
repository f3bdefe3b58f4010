"""Built-in Trinity-style workflows of several turns: conversations with an environment of text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar, Protocol

from archon.rl.compat.trinity.experience import Experience
from archon.rl.compat.trinity.workflow import WORKFLOWS, Task, Workflow, parse_workflow_args
from archon.schema.errors import ConfigError, ContextOverflowError, RolloutError
from archon.schema.lazy import import_dotted

ACTION_PROMPT = (
    "You act in an environment of text. In every turn think between <think> and </think> first, and then give one "
    "action between <action> and </action>."
)
_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_CALL = re.compile(r"(search|click)\[(.*)\]", re.DOTALL)


class TextEnv(Protocol):
    """An environment whose observations and actions are text."""

    def reset(self, task: dict[str, Any]) -> str:
        """Begin the task of a row, and returns the first observation."""
        ...

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Return the next observation, the reward, whether the task is done, and any information."""
        ...


@WORKFLOWS.register_module("text_env_workflow")
class TextEnvWorkflow(Workflow):
    """A conversation with a `TextEnv`. The reward is the sum of the environment's; all answers are trained.

    `workflow_args` are `env`, a class or factory of the environment or its dotted path, `env_args` for it, and
    `max_env_steps`, the maximal number of answers (10). A truncated answer also ends the conversation. Each concurrent
    run has its own environment; a factory may return clients of a shared one.
    """

    can_reset = True
    can_repeat = False
    name: ClassVar[str] = "text_env_workflow"
    defaults: ClassVar[dict[str, Any]] = {"env": None, "env_args": {}, "max_env_steps": 10}

    def __init__(self, *, task: Task, model: Any, auxiliary_models: list[Any] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        args = parse_workflow_args(self.name, task.workflow_args, self.defaults)
        env, self.max_env_steps = args["env"], int(args["max_env_steps"])
        if env is None or self.max_env_steps < 1:
            raise ConfigError(
                f"workflow_args of {self.name}: env is {env!r} and max_env_steps {self.max_env_steps}; expected "
                "the dotted path of an environment, and at least 1"
            )
        self.args = args
        self.make: Callable[..., Any] = import_dotted(env, "environment") if isinstance(env, str) else env
        self.open()

    def open(self) -> None:
        """Make the environment that the tasks of this instance share."""
        self.env = self.make(**self.args["env_args"])

    def first_observation(self) -> str:
        """Begin the task, and returns the first observation."""
        observation: str = self.env.reset(self.task.raw_task)
        return observation

    def act(self, answer: str) -> tuple[str, float, bool]:
        """Return the observation and the reward that the model's answer leads to, and whether the task is done."""
        observation, reward, done, _ = self.env.step(answer)
        return observation, float(reward), bool(done)

    def total(self, rewards: list[float], done: bool) -> float:
        """Return the reward of the conversation."""
        return sum(rewards)

    def system_prompt(self) -> str | None:
        """Return the system message; None or an empty text for none."""
        return self.task.format_args.system_prompt

    def run(self) -> list[Experience]:
        prompt = self.system_prompt()
        messages: list[dict[str, Any]] = [{"role": "system", "content": prompt}] if prompt else []
        messages.append({"role": "user", "content": self.first_observation()})
        sampling = asdict(self.task.rollout_args) | {"n": 1}
        rewards, done = list[float](), False
        while not done and len(rewards) < self.max_env_steps:
            try:
                (response,) = self.model.chat(messages, **sampling)
            except ContextOverflowError:
                if not rewards:
                    raise
                break  # no room for another turn
            messages.append({"role": "assistant", "content": response.response_text or ""})
            observation, reward, done = self.act(messages[-1]["content"])
            rewards.append(reward)
            if response.truncate_status is not None:
                break
            messages.append({"role": "user", "content": observation})
        if messages[-1]["role"] == "user":
            messages.pop()
        info = {"env_steps": len(rewards), "env_done": done}
        return [self.process_messages_to_experience(messages, self.total(rewards, done), info)]


@WORKFLOWS.register_module("gym_env_workflow")
class GymEnvWorkflow(TextEnvWorkflow):
    """A conversation with an environment that has gym's methods, on text.

    `reset()` returns an observation, or one and any information; `step(action)` returns observation, reward, done and
    information, or as gymnasium has it observation, reward, terminated, truncated and information. The action is what
    the answer has between action tags, and empty without them. The reward is that of the step that ends the task, and
    `unfinished_reward` (−0.1) where none does. `workflow_args` are those of `text_env_workflow`, with up to 30 steps.
    """

    name = "gym_env_workflow"
    defaults: ClassVar[dict[str, Any]] = TextEnvWorkflow.defaults | {"max_env_steps": 30, "unfinished_reward": -0.1}

    def first_observation(self) -> str:
        return self.format_observation(self.env.reset())

    def format_observation(self, observation: Any) -> str:
        """Return an observation as the user's message."""
        if isinstance(observation, tuple):  # with information
            observation = observation[0]
        if not isinstance(observation, str):
            raise RolloutError(
                f"{self.name}: the environment's observation is a {type(observation).__name__}, expected text"
            )
        return f"Observation: {observation}"

    def act(self, answer: str) -> tuple[str, float, bool]:
        found = _ACTION.search(answer)
        return self.take(found[1].strip() if found else "")

    def take(self, action: str) -> tuple[str, float, bool]:
        """Return what `act` returns, for an action."""
        observation, reward, *ends, _ = self.env.step(action)
        return self.format_observation(observation), float(reward), any(map(bool, ends))

    def total(self, rewards: list[float], done: bool) -> float:
        return rewards[-1] if done else float(self.args["unfinished_reward"])

    def system_prompt(self) -> str | None:
        given = self.task.format_args.system_prompt
        return ACTION_PROMPT if given is None else given


@WORKFLOWS.register_module("alfworld_workflow")
class AlfworldWorkflow(GymEnvWorkflow):
    """A `GymEnvWorkflow` whose environments are of one task, as ALFWorld's: `env` is a function of the task's prompt,
    such as the path of a game. The environment is closed after the task, if it can be.
    """

    name = "alfworld_workflow"

    def open(self) -> None:
        """Do nothing, as `first_observation` makes the environment."""

    def first_observation(self) -> str:
        self.env = self.make(self.task.task_desc, **self.args["env_args"])
        return super().first_observation()

    def run(self) -> list[Experience]:
        self.env = None
        try:
            return super().run()
        finally:
            if hasattr(self.env, "close"):
                self.env.close()


@WORKFLOWS.register_module("webshop_workflow")
class WebShopWorkflow(GymEnvWorkflow):
    """A `GymEnvWorkflow` for an environment with WebShop's methods, of up to 15 steps.

    The task's prompt is the number of a session, with which `reset(session=…)` begins; the first observation is what it
    returns, or the environment's `observation`. An action is search[words] or click[button]. One that
    `get_available_actions()` does not have is answered by what is wrong with it, and costs a step.
    """

    name = "webshop_workflow"
    defaults: ClassVar[dict[str, Any]] = GymEnvWorkflow.defaults | {"max_env_steps": 15}

    def first_observation(self) -> str:
        try:
            session = int(self.task.task_desc or 0)
        except ValueError:
            raise RolloutError(
                f"webshop_workflow: the prompt is {self.task.task_desc!r:.80}, expected the number of a session"
            ) from None
        observation = self.env.reset(session=session)
        return self.format_observation(self.env.observation if observation is None else observation)

    def take(self, action: str) -> tuple[str, float, bool]:
        wrong = self.action_error(action)
        return super().take(action) if wrong is None else (wrong, 0.0, False)

    def action_error(self, action: str) -> str | None:
        """Return what is wrong with an action; None where the environment accepts it."""
        available, call = self.env.get_available_actions(), _CALL.fullmatch(action)
        if call is None:
            return "This is no action. Write <action>search[words]</action> or <action>click[button]</action>."
        if call[1] == "click":
            buttons = available["clickables"]
            return None if call[2].lower() in buttons else f"There is no such button. The buttons are: {buttons}"
        if not call[2].strip():
            return "The search is empty. Write the words between the brackets."
        return None if available["has_search_bar"] else "There is no search bar here. Go back to the search first."
