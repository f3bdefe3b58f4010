"""Built-in multi-turn Trinity-style workflows for text environments."""

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
    """Environment with text observations and actions."""

    def reset(self, task: dict[str, Any]) -> str:
        """Begin the task of a row and return the first observation."""
        ...

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Return the next observation, the reward, whether the task is done, and an info dictionary."""
        ...


@WORKFLOWS.register_module("text_env_workflow")
class TextEnvWorkflow(Workflow):
    """Conversation with a `TextEnv`; the reward is the sum of step rewards, and all answers are trained.

    `workflow_args.env` is the environment's class, a factory, or a dotted path to either; `env_args` are its arguments.
    `max_env_steps` limits the number of answers (10). A truncated answer ends the conversation. Concurrent runs have
    separate environments; a factory may return clients of a shared one.
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
                f"workflow_args of {self.name}: env is {env!r} and max_env_steps is {self.max_env_steps}; expected "
                "the dotted path of an environment, and at least 1"
            )
        self.args = args
        self.make: Callable[..., Any] = import_dotted(env, "environment") if isinstance(env, str) else env
        self.open()

    def open(self) -> None:
        """Make the environment for all tasks of this instance."""
        self.env = self.make(**self.args["env_args"])

    def first_observation(self) -> str:
        """Begin the task and return the first observation."""
        observation: str = self.env.reset(self.task.raw_task)
        return observation

    def act(self, answer: str) -> tuple[str, float, bool]:
        """Send the answer; return the observation, the reward, and whether the task is done."""
        observation, reward, done, _ = self.env.step(answer)
        return observation, float(reward), bool(done)

    def total(self, rewards: list[float], done: bool) -> float:
        """Return the reward of the conversation."""
        return sum(rewards)

    def system_prompt(self) -> str | None:
        """Return the system message; None or an empty text omits it."""
        return self.task.format_args.system_prompt

    def run(self) -> list[Experience]:
        """Talk to the environment until the task is done or the limit is reached."""
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
    """Conversation with a text environment that has the methods of gym or gymnasium.

    The action is the text between the answer's action tags, or empty. The reward is the last step's, or
    `unfinished_reward` (−0.1) for an unfinished task. Other `workflow_args` match `text_env_workflow`, with 30 steps.
    """

    name = "gym_env_workflow"
    defaults: ClassVar[dict[str, Any]] = TextEnvWorkflow.defaults | {"max_env_steps": 30, "unfinished_reward": -0.1}

    def first_observation(self) -> str:
        """Reset the environment and return the first observation."""
        return self.format_observation(self.env.reset())

    def format_observation(self, observation: Any) -> str:
        """Format an observation as the user's message."""
        if isinstance(observation, tuple):  # (observation, info)
            observation = observation[0]
        if not isinstance(observation, str):
            raise RolloutError(
                f"{self.name}: the environment's observation is a {type(observation).__name__}, expected text"
            )
        return f"Observation: {observation}"

    def act(self, answer: str) -> tuple[str, float, bool]:
        """Apply the action between the answer's action tags."""
        match = _ACTION.search(answer)
        return self.take(match[1].strip() if match else "")

    def take(self, action: str) -> tuple[str, float, bool]:
        """Apply an action; return the observation, the reward, and whether the task is done."""
        observation, reward, *ends, _ = self.env.step(action)
        return self.format_observation(observation), float(reward), any(map(bool, ends))

    def total(self, rewards: list[float], done: bool) -> float:
        """Return the last reward, or `unfinished_reward`."""
        return rewards[-1] if done else float(self.args["unfinished_reward"])

    def system_prompt(self) -> str | None:
        """Return the configured system message, or the default about action tags."""
        prompt = self.task.format_args.system_prompt
        return ACTION_PROMPT if prompt is None else prompt


@WORKFLOWS.register_module("alfworld_workflow")
class AlfworldWorkflow(GymEnvWorkflow):
    """`GymEnvWorkflow` with a new environment per task, as in ALFWorld.

    `env` is a function of the task's prompt, such as the path of a game. The environment's `close` runs after the task.
    """

    name = "alfworld_workflow"

    def open(self) -> None:
        """Do nothing; `first_observation` makes the environment."""

    def first_observation(self) -> str:
        """Make the task's environment and return the first observation."""
        self.env = self.make(self.task.task_desc, **self.args["env_args"])
        return super().first_observation()

    def run(self) -> list[Experience]:
        """Run the task and close its environment."""
        self.env = None
        try:
            return super().run()
        finally:
            if hasattr(self.env, "close"):
                self.env.close()


@WORKFLOWS.register_module("webshop_workflow")
class WebShopWorkflow(GymEnvWorkflow):
    """`GymEnvWorkflow` for an environment with WebShop's methods, of up to 15 steps.

    The task's prompt is the session number for `reset(session=…)`. An action is search[words] or click[button]. An
    action outside `get_available_actions()` costs a step and is answered with the error.
    """

    name = "webshop_workflow"
    defaults: ClassVar[dict[str, Any]] = GymEnvWorkflow.defaults | {"max_env_steps": 15}

    def first_observation(self) -> str:
        """Begin the session and return its first observation."""
        try:
            session = int(self.task.task_desc or 0)
        except ValueError:
            raise RolloutError(
                f"webshop_workflow: the prompt is {self.task.task_desc!r:.80}, expected a session number"
            ) from None
        observation = self.env.reset(session=session)
        return self.format_observation(self.env.observation if observation is None else observation)

    def take(self, action: str) -> tuple[str, float, bool]:
        """Apply an action, or return its error as the observation."""
        error = self.action_error(action)
        return super().take(action) if error is None else (error, 0.0, False)

    def action_error(self, action: str) -> str | None:
        """Return an error message for an invalid action, else None."""
        available, call = self.env.get_available_actions(), _CALL.fullmatch(action)
        if call is None:
            return "This is no action. Write <action>search[words]</action> or <action>click[button]</action>."
        if call[1] == "click":
            buttons = available["clickables"]
            return None if call[2].lower() in buttons else f"There is no such button. The buttons are: {buttons}"
        if not call[2].strip():
            return "The search is empty. Write the words between the brackets."
        return None if available["has_search_bar"] else "There is no search bar here. Go back to the search first."
