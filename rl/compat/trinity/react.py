"""Built-in Trinity-style ReAct agent with tool calls."""

from __future__ import annotations

import ast
import inspect
import json
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, get_type_hints

from archon.rl.compat.trinity.builtin import MATH_PROMPT, SimpleWorkflow
from archon.rl.compat.trinity.experience import Experience
from archon.rl.compat.trinity.workflow import WORKFLOWS, Task, parse_workflow_args
from archon.schema.errors import ConfigError
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


def calculator(expression: str) -> str:
    """Return the value of an arithmetic expression of numbers, + - * / and brackets."""

    def value(node: ast.AST) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.BinOp | ast.UnaryOp) and type(node.op) in _OPERATIONS:
            operands = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.operand]
            return _OPERATIONS[type(node.op)](*map(value, operands))
        raise ValueError(f"{ast.unparse(node)} is not allowed; use numbers, + - * / and brackets")

    if len(expression) > _MAX_EXPRESSION:
        raise ValueError(f"the expression has {len(expression)} characters; at most {_MAX_EXPRESSION} are allowed")
    return str(value(ast.parse(expression.strip(), mode="eval").body))


def tool_schema(tool: Callable[..., Any]) -> dict[str, Any]:
    """Return the OpenAI tool schema of a function: name, docstring and argument types."""
    hints, parameters = get_type_hints(tool), inspect.signature(tool).parameters
    properties = {name: {"type": _JSON_TYPES.get(hints.get(name, str), "object")} for name in parameters}
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    schema = {"type": "object", "properties": properties, "required": required}
    function = {"name": tool.__name__, "description": inspect.getdoc(tool) or "", "parameters": schema}
    return {"type": "function", "function": function}


@WORKFLOWS.register_module("react_workflow")
class ReActWorkflow(SimpleWorkflow):
    """ReAct agent that runs tool calls until the model answers without one.

    All answers get the reward of the last one. `workflow_args.tools` are functions of JSON arguments or their dotted
    paths (a calculator); `max_turns` limits the number of answers (5). The model sees the error of a failed tool. The
    run needs `enable_openai_api`.
    """

    can_repeat = False
    name: ClassVar[str] = "react_workflow"
    defaults: ClassVar[dict[str, Any]] = {"tools": [calculator], "max_turns": 5}

    def __init__(self, *, task: Task, model: Any, auxiliary_models: list[Any] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        args = parse_workflow_args(self.name, task.workflow_args, self.defaults)
        tools = [import_dotted(tool, "tool") if isinstance(tool, str) else tool for tool in args["tools"]]
        self.tools = {tool.__name__: tool for tool in tools}
        self.max_turns = int(args["max_turns"])
        if self.max_turns < 1:
            raise ConfigError(f"workflow_args of {self.name}: max_turns is {self.max_turns}, expected at least 1")
        self.client = model.get_openai_client()

    def run(self) -> list[Experience]:
        """Let the model call tools until it answers, and score the last answer."""
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
        """Return the tool's result or its error as text."""
        if name not in self.tools:
            return f"error: no tool {name}; available: {', '.join(self.tools)}"
        try:
            return str(self.tools[name](**json.loads(arguments)))
        except Exception as error:  # noqa: BLE001 (user code with arguments of the model)
            return f"error: {type(error).__name__}: {error}"


@WORKFLOWS.register_module("agentscope_reactv2_math_workflow")
@WORKFLOWS.register_module("agentscope_react_math_workflow")
@WORKFLOWS.register_module("agentscope_react_workflow")
@WORKFLOWS.register_module("as_react_workflow")
class AgentScopeReActWorkflow(ReActWorkflow):
    """`ReActWorkflow` for mathematics that needs no agentscope package.

    `workflow_args` adds `type` to the options of `react_workflow`: gsm8k or dapo; both ask for a boxed answer.
    """

    name = "as_react_workflow"
    defaults: ClassVar[dict[str, Any]] = ReActWorkflow.defaults | {"type": "gsm8k"}
    default_reward = "math_reward"

    def reset(self, task: Task) -> None:
        """Read the task and set the default system prompt."""
        super().reset(task)
        kind = task.workflow_args.get("type", "gsm8k")
        if kind not in ("gsm8k", "dapo"):
            raise ConfigError(f"workflow_args of as_react_workflow: type is {kind!r}, expected 'gsm8k' or 'dapo'")
        if self.system_prompt is None:
            self.system_prompt = MATH_PROMPT


AgentScopeReactMathWorkflow = AgentScopeReActWorkflow
