"""The built-in workflows: mathematics, and an environment of text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from archon.rl import REWARD_FUNCTIONS, AsyncRewardWrapper, RewardFn
from archon.rl.compat.trinity import builtin
from archon.rl.compat.trinity.builtin import MATH_PROMPT, THINK_PROMPT
from archon.schema.errors import ConfigError, RolloutError
from tests.rl import rewards_for_tests as rewards
from tests.rl.compat.trinity.conftest import GCONFIG, prompts

KEYS = {"prompt_key": "question", "response_key": "answer"}
COUNTDOWN = "tests.rl.compat.trinity.guide.Countdown"


@REWARD_FUNCTIONS.register_module("two_parts")
class TwoParts(RewardFn):
    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def __call__(self, response: str, truth: str, **_: Any) -> dict[str, float]:
        if len(response) % 2:
            raise ValueError("odd")
        return {"length": self.weight * len(response), "two": float(truth == "2")}


@REWARD_FUNCTIONS.register_module("seven_points")
class SevenPoints(RewardFn):
    def __call__(self, **_: Any) -> float:
        return 7.0


def trained(result: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(result["input_ids"], result["loss_mask"], strict=True)


def test_math_asks_for_a_boxed_answer_and_scores_with_the_runs_reward(adapted, run_episode, tokenizer) -> None:
    with AsyncRewardWrapper(rewards.count_digits, max_workers=1) as reward:
        workflow = adapted("math_workflow", reward_fn=reward, format_args=KEYS)
        result, _ = run_episode(workflow)
    (prompt,) = prompts(result, tokenizer)
    assert MATH_PROMPT in prompt and "user\n1+1=<" in prompt
    for row in range(4):
        answer = result["input_ids"][row][result["loss_mask"][row] == 1]
        text = tokenizer.decode(answer, skip_special_tokens=True)
        assert result["rewards"][row].item() == sum(character.isdigit() for character in text)


def test_a_boxed_answer_without_thoughts_loses_the_formats_share(adapted, run_episode, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(builtin, "_THOUGHT", re.compile(r".*[a-m].*", re.DOTALL))  # what a blank model may write
    args = {"with_think": True, "format_score_coef": 0.5}
    workflow = adapted("math_boxed_workflow", reward="seven_points", format_args=KEYS, workflow_args=args)
    result, context = run_episode(workflow)
    texts = [tokenizer.decode(ids[mask == 1], skip_special_tokens=True) for ids, mask in trained(result)]
    formats = [0.0 if re.search("[a-m]", text) else -0.5 for text in texts]
    assert context.numbers["reward/format"] == formats and set(formats) == {0.0, -0.5}
    assert result["rewards"].tolist() == [7.0 + part for part in formats]
    assert THINK_PROMPT in prompts(result, tokenizer).pop()


@pytest.mark.parametrize(
    ("text", "thinks"),
    [("<think>2</think> 3", True), (" <think>a\nb</think>c", True), ("<think></think>3", False), ("3", False)],
)
def test_thoughts_are_what_comes_first_between_tags(text: str, thinks: bool) -> None:
    assert (builtin._THOUGHT.fullmatch(text) is not None) is thinks


def test_a_base_model_is_asked_in_plain_text(adapted, run_episode, tokenizer) -> None:
    workflow = adapted("math_boxed_workflow", reward="seven_points", format_args=KEYS, workflow_args={"use_base": True})
    result, _ = run_episode(workflow)
    assert prompts(result, tokenizer) == {f"System: {MATH_PROMPT}\nUser: 1+1=\nAssistant:"}


def test_a_system_prompt_of_the_runs_own_stands_in_its_place(adapted, run_episode, tokenizer) -> None:
    for given, expected in (("be brief", "system\nbe brief<"), ("", "")):
        workflow = adapted("math_workflow", reward="two_parts", format_args={**KEYS, "system_prompt": given})
        result, _ = run_episode(workflow)
        (prompt,) = prompts(result, tokenizer)
        assert expected in prompt and MATH_PROMPT not in prompt


def test_a_reward_class_is_made_with_its_arguments_and_its_parts_are_recorded(adapted, run_episode) -> None:
    workflow = adapted("simple_workflow", reward="two_parts", reward_fn_args={"weight": 3.0}, format_args=KEYS)
    result, context = run_episode(workflow, seed=2)
    kept = len(result["rewards"])
    assert context.drops == {"reward_raised": 4 - kept} and 0 < kept < 4
    assert [reward - 1 for reward in result["rewards"].tolist()] == context.numbers["reward/length"]
    assert all(length % 6 == 0 for length in context.numbers["reward/length"])


def test_a_task_without_the_prompt_says_which_columns_it_has(adapted, run_episode) -> None:
    with pytest.raises(RolloutError, match="no text under prompt_key 'prompt'; it has 'question', 'answer'"):
        run_episode(adapted("math_workflow"))


def test_an_environment_is_spoken_with_until_it_is_done(adapted, run_episode, tokenizer) -> None:
    """Each run is one trajectory; its reward is the sum of the environment's."""
    stops = list(range(10, len(tokenizer), 2))  # enough for a short answer
    args = {"env": COUNTDOWN, "env_args": {"start": 2}, "max_env_steps": 5}
    workflow = adapted(
        "text_env_workflow", gconfig=GCONFIG.new(max_new_tokens=40, stop_token_ids=stops), workflow_args=args
    )
    result, context = run_episode(workflow)
    assert len(result["rewards"]) == 4 and context.numbers["env_done"] == [1.0] * 4
    assert context.numbers["env_steps"] == [2.0] * 4
    for row in range(4):
        said = ""
        for turn in range(2):
            answer = result["input_ids"][row][result["turn_ids"][row] == turn]
            assert len(answer) > 0
            said += tokenizer.decode(answer, skip_special_tokens=True)
        text = tokenizer.decode(result["input_ids"][row][result["attention_mask"][row]])
        assert text.index("user\n1+1=<") < text.index("user\n1+<")
        assert result["rewards"][row].item() == sum(character.isdigit() for character in said)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "env is None"),
        ({"env": COUNTDOWN, "max_env_steps": 0}, "max_env_steps is 0"),
        ({"env": COUNTDOWN, "max_steps": 3}, "unknown 'max_steps', did you mean 'max_env_steps'"),
        (
            {"env": "tests.rl.compat.trinity.guide.Nowhere"},
            "environment 'tests.rl.compat.trinity.guide.Nowhere' cannot be imported",
        ),
    ],
)
def test_an_environment_that_is_not_there_is_refused(adapted, run_episode, args, message) -> None:
    with pytest.raises(ConfigError, match=message):
        run_episode(adapted("text_env_workflow", workflow_args=args))
