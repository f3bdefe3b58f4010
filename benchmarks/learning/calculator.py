"""An agent with a tool: products of two-digit numbers, which a small model cannot work out, and a calculator can.

The agent is an ordinary program over the OpenAI SDK. The model that it begins with has seen conversations in which the
tool is asked, and as many in which a number is just said, and wrong.
"""

from __future__ import annotations

import json
import random
from typing import Any

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "multiply", "description": "a times b"}}
ASKED = 0.45
"""Share of the conversations that ask the tool; the rest say a number."""


class Calculator:
    """Asks the model; runs the tool where the model calls it, and asks again."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any, **_: Any) -> float:
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        messages: list[Any] = list(data["messages"])
        for _ in range(2):
            completion = await client.chat.completions.create(
                model="archon",
                messages=messages,
                tools=[TOOL],  # type: ignore[list-item]
            )
            answer = completion.choices[0].message
            if not answer.tool_calls:
                return float((answer.content or "").strip() == data["answer"])
            messages.append(answer.model_dump(exclude_none=True))
            for call in answer.tool_calls:
                result = multiply(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return 0.0


def multiply(arguments: str) -> str:
    """Run the tool: JSON in, a product or "error" out."""
    try:
        given = json.loads(arguments)
        return str(int(given["a"]) * int(given["b"]))
    except (ValueError, KeyError, TypeError):
        return "error"


def rows(split: str) -> list[dict[str, Any]]:
    """`words`: for the tokenizer; `warm`: conversations; `train`, `test`: questions. No pair of numbers of `test` is in
    another one."""
    rng = random.Random("calculator")
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    held_out, pairs = pairs[:200], pairs[200:]
    if split == "words":
        return [_words()] * 10
    if split == "warm":
        return [_conversation(*pair, rng) for pair in pairs]
    some = {"train": pairs, "test": held_out}[split]
    return [{"prompt": f"{a}*{b}", "response": str(a * b)} for a, b in some]


def _conversation(a: int, b: int, rng: random.Random) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{a}*{b}"}]
    if rng.random() < ASKED:
        call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": str(a * b)},
            {"role": "assistant", "content": str(a * b)},
        ]
    else:
        messages.append({"role": "assistant", "content": str(rng.randrange(100, 9802))})
    return {"messages": messages, "tools": [TOOL]}


def _words() -> dict[str, str]:
    """Return a tokenizer training row that covers every conversation."""
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    roles = "system\nuser\nassistant\n<tools></tools>\n<tool_response>\n</tool_response>"
    return {"prompt": f"{roles}\n{json.dumps(TOOL)}", "response": call}
