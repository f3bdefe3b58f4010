"""The built-in ReAct agent: a model that calls the calculator, and what is trained of its conversation."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from archon.generation import InProcessEngine
from archon.rl import GenerationHyperparameters, TrinityWorkflow
from archon.rl.bootstrap import make_tokenizer
from archon.rl.compat.trinity.builtin import MATH_PROMPT
from archon.rl.compat.trinity.react import calculator, tool_schema
from archon.rl.prompts import Prompt
from archon.rl.rollout import Rollout
from archon.schema.errors import ConfigError, RolloutError
from archon.training.config import TokenizerRecipe
from tests.serve.scripted import Scripted
from tests.serve.taught import teach
from tests.small_qwen3 import small_model

ROW = {"raw_task": {"question": "12*(3+4)", "answer": "84"}}
KEYS = {"prompt_key": "question", "response_key": "answer"}


def call(name: str, expression: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


SAYS = ["I calculate.\n" + call("calculator", "12*(3+4)"), "84"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(TokenizerRecipe(kind="bpe", vocab_size=400), SAYS)


def react(tokenizer: Any, n_samples: int = 1, name: str = "react_workflow", **arguments: Any) -> TrinityWorkflow:
    gconfig = GenerationHyperparameters(n_samples=n_samples, max_new_tokens=100, greedy=True)
    given = {"enable_openai_api": True, "format_args": KEYS} | arguments
    return TrinityWorkflow(name, gconfig, tokenizer, reward_fn="exact_match", **given)


def said_to(tokenizer: Any, says: list[str], **arguments: Any) -> tuple[Any, Scripted]:
    """The only episode of a model that says this, and its generator."""
    told = Scripted(tokenizer, says)
    rollout = Rollout(told, react(tokenizer, **arguments), log=lambda _: None)  # type: ignore[arg-type]
    return asyncio.run(rollout.run([Prompt(0, ROW)]))[0], told


def test_a_model_calls_the_calculator_and_its_answers_alone_are_trained(tokenizer: Any) -> None:
    _, told = said_to(tokenizer, SAYS)
    answers = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in SAYS]
    model = small_model(len(tokenizer), max_seq_len=1024)
    teach(model, list(zip([request.input_ids for request in told.requests], answers, strict=True)), sure=0.99)
    engine = InProcessEngine.from_model(model, tokenizer, max_slots=8)

    rollout = Rollout(engine, react(tokenizer, n_samples=2))
    (episode,) = asyncio.run(rollout.run([Prompt(0, ROW)]))

    assert episode.error is None and episode.context.numbers["tool_calls"] == [1.0, 1.0]
    group = episode.trajectories
    assert group is not None and group["rewards"].tolist() == [1.0, 1.0]
    for row in range(2):
        trained = group["loss_mask"][row] == 1
        assert group["input_ids"][row][trained].tolist() == answers[0] + answers[1]
        assert (group["logprobs"][row][trained] < 0).all()
        assert "<tool_response>\n84\n</tool_response>" in tokenizer.decode(group["input_ids"][row])


@pytest.mark.parametrize("name", ["as_react_workflow", "agentscope_react_workflow"])
def test_trinitys_name_for_it_asks_for_a_boxed_answer(tokenizer: Any, name: str) -> None:
    episode, told = said_to(tokenizer, SAYS, name=name, workflow_args={"type": "dapo", "max_turns": 3})
    assert episode.error is None and episode.rewards.tolist() == [1.0]
    assert MATH_PROMPT in tokenizer.decode(told.requests[0].input_ids)


def test_a_tool_that_fails_tells_the_model_why(tokenizer: Any) -> None:
    says = [call("search", "x"), call("calculator", "1/0"), call("calculator", "import os"), "84"]
    episode, told = said_to(tokenizer, says)
    assert episode.error is None and episode.rewards.tolist() == [1.0]
    last = tokenizer.decode(told.requests[-1].input_ids)
    for error in ("no tool search; available: calculator", "ZeroDivisionError: division by zero", "SyntaxError"):
        assert f"<tool_response>\nerror: {error}" in last


def test_turns_are_bounded(tokenizer: Any) -> None:
    episode, told = said_to(tokenizer, SAYS[:1] * 3, workflow_args={"max_turns": 2})
    assert len(told.requests) == 2 and episode.rewards.tolist() == [0.0]


def half(of: int, exactly: bool = True) -> float:
    """Half of it."""
    return of / 2 if exactly else of // 2


def test_a_function_is_described_by_its_signature_and_its_docstring() -> None:
    parameters = {"of": {"type": "integer"}, "exactly": {"type": "boolean"}}
    schema = {"type": "object", "properties": parameters, "required": ["of"]}
    told = {"name": "half", "description": "Half of it.", "parameters": schema}
    assert tool_schema(half) == {"type": "function", "function": told}


@pytest.mark.parametrize(("expression", "value"), [("12*(3+4)", "84"), (" -1 - 2.5", "-3.5"), ("7/2", "3.5")])
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize("expression", ["__import__('os')", "2**9", "x", "'a'*9", "True+1", "1+" * 100 + "1", "("])
def test_the_calculator_does_nothing_else(expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        calculator(expression)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"workflow_args": {"max_turn": 3}}, ConfigError, r"unknown 'max_turn', did you mean 'max_turns'"),
        ({"workflow_args": {"max_turns": 0}}, ConfigError, r"max_turns is 0, expected at least 1"),
        (
            {"name": "as_react_workflow", "workflow_args": {"type": "code"}},
            ConfigError,
            r"type is 'code', expected 'gsm8k' or 'dapo'",
        ),
        ({"workflow_args": {"tools": ["nowhere.at_all"]}}, ConfigError, r"tool 'nowhere.at_all' cannot be imported"),
        (
            {"enable_openai_api": False},
            RolloutError,
            r"no OpenAI endpoint; set explorer.rollout_model.enable_openai_api",
        ),
    ],
)
def test_what_the_agent_cannot_run_with_is_refused(
    tokenizer: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    workflow = react(tokenizer, **arguments)
    with pytest.raises(error, match=message):
        asyncio.run(workflow.arun_episode(Scripted(tokenizer, SAYS), ROW))  # type: ignore[arg-type]
