"""An agent that uses a tool through the OpenAI SDK. archon records its exact tokens and trains on them.

    archon rl --config examples/agent.yaml actor.path=Qwen/Qwen3-0.6B

The agent is ordinary code: it also runs against any OpenAI endpoint, without archon.
"""

import ast
import json
import operator

from openai import AsyncOpenAI

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute an expression of integers with +, - and *.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def calculate(expression):
    """Return the value of an expression such as `12*(3+4)`; raise ValueError for anything else."""

    def value(node):
        if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**9:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return OPERATIONS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(f"cannot compute {expression!r}: expected integers with +, - and *")

    try:
        return value(ast.parse(expression[:200], mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"cannot compute {expression!r}: {error.msg}") from None


class Calculator:
    """Answer with at most `max_calls` calls of the calculator; an answer that ends in the right number earns 1."""

    def __init__(self, max_calls=3):
        self.max_calls = max_calls

    async def run(self, data, *, base_url, api_key, http_client=None, **further):
        """Return the reward of one episode; `data` has `prompt` and `answer`."""
        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        messages = [{"role": "user", "content": data["prompt"]}]
        for _ in range(self.max_calls + 1):
            completion = await client.chat.completions.create(model="archon", messages=messages, tools=[CALCULATE])
            message = completion.choices[0].message
            if not message.tool_calls:
                return float((message.content or "").strip().endswith(str(data["answer"])))
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                try:
                    result = str(calculate(json.loads(call.function.arguments)["expression"]))
                except (ValueError, KeyError, TypeError) as error:
                    result = f"error: {error}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return 0.0
