"""Workflows in the shapes of the public guides; a user's module, of which only the imports are archon's."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from archon.rl import WORKFLOWS, Experience, ModelWrapper, Task, Workflow


@WORKFLOWS.register_module("guide_workflow")
class GuideWorkflow(Workflow):
    """One call for all answers, resettable as the older guides have it: the task's own fields are all it resets."""

    made: ClassVar[list[GuideWorkflow]] = []

    def __init__(self, task: Task, model: ModelWrapper, auxiliary_models: list[Any]) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.made.append(self)
        self.tasks: list[str] = []
        self.rollout_args = task.rollout_args
        self.reset(task)

    def calculate_reward(self, response: str, truth: str) -> float:
        return float(sum(character in truth for character in response))

    def run(self) -> list[Experience]:
        responses = self.model.chat(
            [{"role": "user", "content": f"Question:\n{self.question}"}],
            n=self.rollout_args.n,
            temperature=self.rollout_args.temperature,
        )
        return [
            Experience(
                tokens=response.tokens,
                prompt_length=response.prompt_length,
                reward=self.calculate_reward(response.response_text, self.answer),
                logprobs=response.logprobs,
            )
            for response in responses
        ]

    def resettable(self) -> bool:
        return True

    def reset(self, task: Task) -> None:
        self.question = task.raw_task.get("question")
        self.answer = task.raw_task.get("answer")
        self.tasks.append(self.question)


class OneAnswerWorkflow(GuideWorkflow):
    """A run gives one answer, and says nothing of repetition."""

    def run(self) -> list[Experience]:
        response = self.model.chat([{"role": "user", "content": self.question}], temperature=1.0)[0]
        reward = self.calculate_reward(response.response_text, self.answer)
        return [Experience(tokens=response.tokens, prompt_length=response.prompt_length, reward=reward)]


class RepeatableWorkflow(GuideWorkflow):
    """Told by `set_repeat_times` how many answers one run gives."""

    @property
    def repeatable(self) -> bool:
        return True

    @property
    def resettable(self) -> bool:
        return False

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        self.repeat_times, self.run_id_base = repeat_times, run_id_base

    def run(self) -> list[Experience]:
        responses = self.model.chat([{"role": "user", "content": self.question}], n=self.repeat_times)
        for place, response in enumerate(responses):
            response.reward = float(place)
            response.eid.run = self.run_id_base + place
        return responses


class AsyncWorkflow(Workflow):
    is_async: bool = True
    can_reset: bool = True

    async def run_async(self) -> list[Experience]:
        assert threading.current_thread() is threading.main_thread()
        messages = [{"role": "user", "content": self.task.raw_task["question"]}]
        responses = await self.model.chat_async(messages, n=self.task.rollout_args.n)
        for response in responses:
            response.reward = float(len(response.response_text))
            response.metrics["asked"] = 1.0
        return responses


class Countdown:
    """An environment of text: says a number, and pays for every digit until it has counted to 0."""

    def __init__(self, start: int = 3) -> None:
        self.start = start

    def reset(self, task: dict[str, Any]) -> str:
        self.left = self.start
        return task["question"]

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        self.left -= 1
        return f"{self.left}+", float(sum(c.isdigit() for c in action)), self.left == 0, {}


class Gym:
    """An environment with gym's methods: done after `goal` steps, for 2.5."""

    def __init__(self, goal: int = 2) -> None:
        self.goal = goal

    def reset(self) -> Any:
        self.steps = 0
        return "step 0"

    def step(self, action: str) -> tuple[Any, ...]:
        self.steps += 1
        done = self.steps == self.goal
        return f"step {self.steps} after {action!r}", 2.5 if done else 0.0, done, {}


class Gymnasium(Gym):
    """The same with gymnasium's: information at the reset, and a task that may be cut off."""

    def reset(self) -> Any:
        return super().reset(), {"lives": 1}

    def step(self, action: str) -> tuple[Any, ...]:
        observation, reward, done, info = super().step(action)
        return observation, reward, False, done, info


class Game(Gym):
    """An environment of one game, as ALFWorld's."""

    opened: ClassVar[list[Game]] = []

    def __init__(self, file: str, goal: int) -> None:
        super().__init__(goal)
        self.file, self.closed = file, False
        self.opened.append(self)

    def close(self) -> None:
        self.closed = True


class Shop:
    """An environment with WebShop's methods: one search, then one button."""

    def reset(self, session: int) -> None:
        self.observation, self.searched = f"session {session} [Search]", False

    def get_available_actions(self) -> dict[str, Any]:
        return {"has_search_bar": not self.searched, "clickables": ["buy now"] if self.searched else ["search"]}

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        bought, self.searched = self.searched, True
        return f"results of {action}", 0.75 if bought else 0.0, bought, {}


class Blind(Gym):
    """An environment that does not speak text."""

    def reset(self) -> Any:
        return 0


class Word(Game):
    """A game of two steps that pays every second one that is opened."""

    def __init__(self, file: str) -> None:
        super().__init__(file, goal=2)
        self.number = len(self.opened)

    def step(self, action: str) -> tuple[Any, ...]:
        observation, _, done, info = super().step(action)
        return observation, float(self.number % 2), done, info
