"""The built-in environment workflows on environments with the methods of gym, ALFWorld and WebShop."""

from __future__ import annotations

from typing import Any

import pytest

from archon.rl.compat.trinity.environments import ACTION_PROMPT
from archon.rl.compat.trinity.workflow import Task
from archon.schema.errors import ConfigError, RolloutError
from tests.rl.compat.trinity import guide
from tests.rl.compat.trinity.conftest import GCONFIG, prompts

GUIDE = "tests.rl.compat.trinity.guide."


class Told:
    """A model that says what it is told to; the runs of these tests are not trained."""

    def __init__(self, *says: str) -> None:
        self.says, self.asked = iter(says), list[list[dict[str, Any]]]()

    def chat(self, messages: list[dict[str, Any]], **sampling: Any) -> list[Any]:
        from archon.rl import Experience

        self.asked.append([*messages])
        return [Experience(tokens=[1, 2], response_text=next(self.says))]

    def convert_messages_to_experience(self, messages: list[dict[str, Any]]) -> Any:
        from archon.rl import Experience

        return Experience(tokens=[1, 2], messages=messages)


def ran(name: str, model: Told, prompt: str = "7", **args: Any) -> Any:
    from archon.rl import WORKFLOWS

    task = Task(raw_task={"prompt": prompt}, workflow_args=args)
    (experience,) = WORKFLOWS[name](task=task, model=model).run()
    return experience


def act(action: str) -> str:
    return f"<think>so</think><action>{action}</action>"


@pytest.mark.parametrize("env", ["Gym", "Gymnasium"])
def test_a_gym_environment_gets_the_actions_and_its_last_reward_counts(env: str) -> None:
    model = Told(act("north"), "no action", act("take"))
    experience = ran("gym_env_workflow", model, env=GUIDE + env, env_args={"goal": 3})
    assert experience.reward == 2.5 and experience.info == {"env_steps": 3, "env_done": True}
    said = [message["content"] for message in experience.messages]
    assert said[0] == ACTION_PROMPT and said[1] == "Observation: step 0"
    assert said[3] == "Observation: step 1 after 'north'" and said[5] == "Observation: step 2 after ''"


def test_a_task_that_does_not_end_has_the_reward_of_an_unfinished_one() -> None:
    model = Told(*[act("wait")] * 2)
    experience = ran("gym_env_workflow", model, env=GUIDE + "Gym", env_args={"goal": 3}, max_env_steps=2)
    assert experience.reward == -0.1 and experience.messages[-1]["role"] == "assistant"
    model = Told(*[act("wait")] * 2)
    args = {"env": GUIDE + "Gym", "env_args": {"goal": 3}, "max_env_steps": 2, "unfinished_reward": -1}
    assert ran("gym_env_workflow", model, **args).reward == -1.0


def test_an_alfworld_environment_is_made_of_the_tasks_game_and_closed() -> None:
    guide.Game.opened.clear()
    model = Told(act("open fridge 1"))
    experience = ran("alfworld_workflow", model, "game_1.z8", env=GUIDE + "Game", env_args={"goal": 1})
    (game,) = guide.Game.opened
    assert (game.file, game.closed, experience.reward) == ("game_1.z8", True, 2.5)


def test_a_webshop_environment_is_begun_by_session_and_wrong_actions_do_not_reach_it() -> None:
    model = Told(act("click[Buy Now]"), act("search[ ]"), "buy it", act("search[shoes]"), act("click[Buy Now]"))
    experience = ran("webshop_workflow", model, "7", env=GUIDE + "Shop")
    said = [message["content"] for message in experience.messages if message["role"] == "user"]
    assert said[0] == "Observation: session 7 [Search]"
    assert "There is no such button. The buttons are: ['search']" in said[1]
    assert "The search is empty" in said[2] and "This is no action" in said[3]
    assert said[4] == "Observation: results of search[shoes]" and experience.reward == 0.75
    model = Told(act("search[a]"), act("search[b]"), act("click[buy now]"))
    experience = ran("webshop_workflow", model, "7", env=GUIDE + "Shop")
    assert "There is no search bar here" in experience.messages[5]["content"]


def test_an_environment_is_trained_on_by_the_real_generator(adapted, run_episode, tokenizer) -> None:
    stops = list(range(10, len(tokenizer), 2))
    args = {"env": GUIDE + "Gym", "env_args": {"goal": 2}}
    workflow = adapted(
        "gym_env_workflow",
        gconfig=GCONFIG.new(max_new_tokens=40, stop_token_ids=stops),
        workflow_args=args,
        format_args={"system_prompt": ""},
    )
    result, context = run_episode(workflow)
    assert result["rewards"].tolist() == [2.5] * 4 and context.numbers["env_steps"] == [2.0] * 4
    assert (result["turn_ids"].max(1).values == 1).all()
    (prompt,) = prompts(result, tokenizer)
    assert "user\nObservation: step 0<" in prompt


@pytest.mark.parametrize(
    ("name", "prompt", "args", "error", "message"),
    [
        ("webshop_workflow", "7", {}, ConfigError, "workflow_args of webshop_workflow: env is None"),
        ("webshop_workflow", "shoes", {"env": GUIDE + "Shop"}, RolloutError, "'shoes', expected a session number"),
        ("alfworld_workflow", "x", {"environment": "x"}, ConfigError, "unknown 'environment'"),
        ("gym_env_workflow", "x", {"env": GUIDE + "Blind"}, RolloutError, "observation is a int, expected text"),
    ],
)
def test_what_an_environment_workflow_cannot_run_with_is_refused(name, prompt, args, error, message) -> None:
    with pytest.raises(error, match=message):
        ran(name, Told(), prompt, **args)
