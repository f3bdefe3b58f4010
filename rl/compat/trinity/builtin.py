"""Built-in Trinity-style workflows: single answers, a conversation with a text environment, and a ReAct agent."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import operator
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol, get_type_hints

from archon.rl.compat.trinity.experience import Experience
from archon.rl.compat.trinity.workflow import WORKFLOWS, Task, Workflow, parse_workflow_args
from archon.rl.episode_context import workflow_context
from archon.rl.rewards import AsyncRewardWrapper, Reward, RewardFailure, RewardRaised, as_reward
from archon.rl.workflows.base import kept_samples
from archon.schema.errors import ConfigError, ContextOverflowError, RolloutError
from archon.schema.lazy import import_dotted

_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
_MAX_EXPRESSION = 200  # characters

MATH_PROMPT = r"Think step by step. State the final answer, and nothing but it, as \boxed{answer}."


@WORKFLOWS.register_module("simple_workflow")
class SimpleWorkflow(Workflow):
    """Asks the task's prompt, and scores each answer with the task's reward."""

    can_reset = True
    can_repeat = True

    def __init__(self, *, task: Task, model: Any, auxiliary_models: list[Any] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)

    def reset(self, task: Task) -> None:
        super().reset(task)
        self.format_args, self.raw_task = task.format_args, task.raw_task
        self.system_prompt = task.format_args.system_prompt
        self.task_desc, self.truth = task.task_desc, task.truth
        if not isinstance(self.task_desc, str):
            raise RolloutError(
                f"{type(self).__name__}: the task has no text under prompt_key {self.format_args.prompt_key!r}; it has "
                f"{', '.join(map(repr, self.raw_task)) or 'nothing'}"
            )
        reward = task.reward_fn
        self.reward_fn = reward(**task.reward_fn_args) if isinstance(reward, type) else reward
        if not callable(self.reward_fn):
            raise ConfigError(f"{type(self).__name__} scores with the task's reward_fn, and there is none; name one")

    @property
    def rollout_args(self) -> dict[str, Any]:
        """Returns the task's sampling parameters, for `model.chat(messages, **self.rollout_args)`."""
        return asdict(self.task.rollout_args) | {"n": self.repeat_times}

    def format_messages(self) -> list[dict[str, Any]]:
        """Returns the messages of the prompt."""
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*system, {"role": "user", "content": self.task_desc}]

    def run(self) -> list[Experience]:
        return self.score(self.model.chat(self.format_messages(), **self.rollout_args))

    def score(self, responses: Sequence[Experience]) -> list[Experience]:
        """Returns the responses with their rewards. One whose reward fails is dropped and counted by kind."""
        outcomes: list[Reward | BaseException]
        if isinstance(self.reward_fn, AsyncRewardWrapper):
            outcomes = self.model.wait(self._score_all(self.reward_fn, responses))
        else:
            outcomes = [self._score_one(response) for response in responses]
        kept = kept_samples(responses, outcomes)
        for response, reward in kept:
            response.reward = float(reward)
            response.metrics.update({f"reward/{name}": part for name, part in reward.parts.items()})
        return [response for response, _ in kept]

    def _score_one(self, response: Experience) -> Reward | BaseException:
        name = type(self.reward_fn).__qualname__
        try:
            return as_reward(self.reward_fn(response=response.response_text, truth=self.truth), name)
        except RewardFailure as failure:
            return failure
        except Exception as error:  # noqa: BLE001 (a user's code: whatever it raises costs this one sample)
            message = f"reward function {name} raised {type(error).__name__}: {error}"
            return RewardRaised(message, traceback.format_exc())

    async def _score_all(
        self, reward_fn: AsyncRewardWrapper, responses: Sequence[Experience]
    ) -> list[Reward | BaseException]:
        row = self.raw_task if self.truth is None else self.raw_task | {"answer": str(self.truth)}

        async def one(index: int, response: Experience) -> Reward:
            workflow_context.enter_sample(index)
            ids = response.tokens.tolist()
            prompt_ids, answer_ids = ids[: response.prompt_length], ids[response.prompt_length :]
            return await reward_fn(response.prompt_text, response.response_text, prompt_ids, answer_ids, **row)

        return await asyncio.gather(*map(one, range(len(responses)), responses), return_exceptions=True)


@WORKFLOWS.register_module("math_workflow")
class MathWorkflow(SimpleWorkflow):
    """A `SimpleWorkflow` for mathematics, whose default system prompt asks for a boxed answer."""

    def reset(self, task: Task) -> None:
        super().reset(task)
        if self.system_prompt is None:
            self.system_prompt = MATH_PROMPT


class TextEnv(Protocol):
    """An environment whose observations and actions are text."""

    def reset(self, task: dict[str, Any]) -> str:
        """Begins the task of a row, and returns the first observation."""
        ...

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Returns the next observation, the reward, whether the task is done, and any information."""
        ...


@WORKFLOWS.register_module("text_env_workflow")
class TextEnvWorkflow(Workflow):
    """A conversation with an environment. The reward is the sum of the environment's; all answers are trained.

    `workflow_args` are `env`, a class or factory of `TextEnv` or its dotted path, `env_args` for it, and
    `max_env_steps`, the maximal number of answers (10). A truncated answer also ends the conversation.
    """

    can_reset = True
    can_repeat = False

    def __init__(self, *, task: Task, model: Any, auxiliary_models: list[Any] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        defaults: dict[str, Any] = {"env": None, "env_args": {}, "max_env_steps": 10}
        args = parse_workflow_args("text_env_workflow", task.workflow_args, defaults)
        env, self.max_env_steps = args["env"], int(args["max_env_steps"])
        if env is None or self.max_env_steps < 1:
            raise ConfigError(
                f"workflow_args of text_env_workflow: env is {env!r} and max_env_steps {self.max_env_steps}; expected "
                "the dotted path of an environment, and at least 1"
            )
        make: Callable[..., TextEnv] = import_dotted(env, "environment") if isinstance(env, str) else env
        self.env = make(**args["env_args"])

    def run(self) -> list[Experience]:
        prompt = self.task.format_args.system_prompt
        messages: list[dict[str, Any]] = [{"role": "system", "content": prompt}] if prompt else []
        messages.append({"role": "user", "content": self.env.reset(self.task.raw_task)})
        sampling = asdict(self.task.rollout_args) | {"n": 1}
        total, steps, done = 0.0, 0, False
        while not done and steps < self.max_env_steps:
            try:
                (response,) = self.model.chat(messages, **sampling)
            except ContextOverflowError:
                if steps == 0:
                    raise
                break  # no room for another turn
            action = response.response_text or ""
            messages.append({"role": "assistant", "content": action})
            observation, reward, done, _ = self.env.step(action)
            total, steps = total + float(reward), steps + 1
            if response.truncate_status is not None:
                break
            messages.append({"role": "user", "content": observation})
        if messages[-1]["role"] == "user":
            messages.pop()
        return [self.process_messages_to_experience(messages, total, {"env_steps": steps, "env_done": done})]


def calculator(expression: str) -> str:
    """Returns the value of an arithmetic expression of numbers, + - * / and brackets."""

    def value(node: ast.AST) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.BinOp | ast.UnaryOp) and type(node.op) in _OPERATIONS:
            operands = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.operand]
            return _OPERATIONS[type(node.op)](*map(value, operands))
        raise ValueError(f"{ast.unparse(node)} is none of numbers, + - * / and brackets")

    if len(expression) > _MAX_EXPRESSION:
        raise ValueError(f"an expression may have {_MAX_EXPRESSION} characters")
    return str(value(ast.parse(expression.strip(), mode="eval").body))


def tool_schema(tool: Callable[..., Any]) -> dict[str, Any]:
    """Returns OpenAI's description of a tool: the function's name, docstring, and argument types."""
    hints, parameters = get_type_hints(tool), inspect.signature(tool).parameters
    properties = {name: {"type": _JSON_TYPES.get(hints.get(name, str), "object")} for name in parameters}
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    schema = {"type": "object", "properties": properties, "required": required}
    function = {"name": tool.__name__, "description": inspect.getdoc(tool) or "", "parameters": schema}
    return {"type": "function", "function": function}


@WORKFLOWS.register_module("react_workflow")
class ReActWorkflow(SimpleWorkflow):
    """A ReAct agent: runs the tools that the model calls until it answers without a call.

    All answers get the reward of the last one. `workflow_args` are `tools`, functions of JSON arguments or their dotted
    paths (a calculator), and `max_turns`, the maximal number of answers (5). A tool that fails returns its error to the
    model. The run needs `enable_openai_api`.
    """

    can_repeat = False

    def __init__(self, *, task: Task, model: Any, auxiliary_models: list[Any] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        defaults: dict[str, Any] = {"tools": [calculator], "max_turns": 5}
        args = parse_workflow_args("react_workflow", task.workflow_args, defaults)
        tools = [import_dotted(tool, "tool") if isinstance(tool, str) else tool for tool in args["tools"]]
        self.tools = {tool.__name__: tool for tool in tools}
        self.max_turns = int(args["max_turns"])
        if self.max_turns < 1:
            raise ConfigError(f"workflow_args of react_workflow: max_turns is {self.max_turns}, expected at least 1")
        self.client = model.get_openai_client()

    def run(self) -> list[Experience]:
        from openai import BadRequestError

        messages: list[Any] = self.format_messages()
        tools = [tool_schema(tool) for tool in self.tools.values()]
        answer = None
        for _ in range(self.max_turns):
            try:
                completion = self.client.chat.completions.create(
                    model=self.client.model_path, messages=messages, tools=tools
                )
            except BadRequestError as error:
                if answer is None or error.code != "context_length_exceeded":
                    raise
                break  # no room for another turn
            answer = completion.choices[0].message
            if not answer.tool_calls:
                break
            messages.append(answer.model_dump(exclude_none=True))
            for call in answer.tool_calls:
                result = self._call_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        experiences = self.model.extract_experience_from_history()
        text = (answer.content if answer else None) or ""
        (last,) = self.score([replace(experiences[-1], response_text=text, metrics={})])
        for experience in experiences:
            experience.reward = last.reward
        experiences[-1].metrics = last.metrics | {"tool_calls": sum(m["role"] == "tool" for m in messages)}
        return experiences

    def _call_tool(self, name: str, arguments: str) -> str:
        """Returns the tool's result, or its error, after which the model may try again."""
        if name not in self.tools:
            return f"error: no tool {name}; there are {', '.join(self.tools)}"
        try:
            return str(self.tools[name](**json.loads(arguments)))
        except Exception as error:  # noqa: BLE001 (the model's arguments, a user's function)
            return f"error: {type(error).__name__}: {error}"
