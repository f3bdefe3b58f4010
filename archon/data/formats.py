"""Recognition of public row formats, which are converted to messages: OpenAI, ShareGPT, TRL, Alpaca, plain text.

A format is recognized by the columns of the first row, only if `prompt_key` and `response_key` are the defaults and the
row does not have these columns. Every row must have the same format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import product
from typing import Any

from archon.checkpoint.chat_template import Message
from archon.data.sources import ConvertedRows, SourceRow
from archon.schema.errors import DatasetError

Rows = Sequence[SourceRow]
Recognized = tuple[Rows, str | None, str | None, str]

PROMPT_KEY, RESPONSE_KEY = "prompt", "response"
ENCODED = ("input_ids", "loss_mask")
_CONVERSATIONS = ("messages", "conversations", "conversation")
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
_QUESTIONS = ("prompt", "question", "problem", "instruction")
_ANSWERS = ("answer", "solution", "ground_truth", "completion", "output")
_RESPONSES = ("solution", "completion", "output", "answer", "ground_truth")  # SFT prefers a worked solution


def recognize(source: Rows, kind: str, prompt_key: str | None, response_key: str | None) -> Recognized:
    """Convert rows of a known format.

    Args:
        source: rows.
        kind: "sft", "rl", "dpo" or "rw".
        prompt_key: configured column of the prompt.
        response_key: configured column of the response.

    Returns:
        The rows, the columns of prompt and response in them, and a description of what is read. The response column is
        None for conversations, and for RL rows without an answer.

    Raises:
        DatasetError: the columns of the first row belong to no known format; names the formats.
    """
    row = source[0]
    defaults = (prompt_key, response_key) == (PROMPT_KEY, RESPONSE_KEY)
    if not defaults or {PROMPT_KEY, RESPONSE_KEY} <= row.data.keys():
        return source, prompt_key, response_key, ""
    read = {"sft": _sft_rows, "rl": _rl_rows}.get(kind, _pair_rows)
    rows, prompt_key, response_key, description = read(source, row.data.keys())
    if not description:
        return rows, prompt_key, response_key, ""
    used = {prompt_key, response_key, PROMPT_KEY, "chosen", "rejected", "completion", "input", "tools", "system"}
    unused = [] if kind == "rl" else sorted(row.data.keys() - used - {*_CONVERSATIONS, *ENCODED, "images", "image"})
    ignored = f"; not used: {', '.join(unused)}" if unused else ""
    return rows, prompt_key, response_key, f"{len(source):,} {description}{ignored}"


def _sft_rows(source: Rows, names: AbstractSet[str]) -> Recognized:
    if all(name in names for name in ENCODED):
        return source, PROMPT_KEY, RESPONSE_KEY, "tokenized rows"
    if name := next((name for name in _CONVERSATIONS if name in names), None):
        rows = ConvertedRows(source, partial(_messages_column, convert=partial(_conversation, name=name)))
        return rows, "messages", None, "conversations"
    if {PROMPT_KEY, "completion"} <= names:
        if isinstance(source[0].data["completion"], str):
            return source, PROMPT_KEY, "completion", "prompts with completions"
        rows = ConvertedRows(source, partial(_messages_column, convert=_prompt_completion))
        return rows, "messages", None, "prompts with completions; training the completions"
    if {"instruction", "output"} <= names:
        return _join_input(source, "instruction"), "instruction", "output", "instructions with outputs"
    if "text" in names:
        return source, "text", None, "plain texts; training every token"
    for question, answer in product(_QUESTIONS, _RESPONSES):
        if {question, answer} <= names:
            return _join_input(source, question), question, answer, f"rows with {question!r} and {answer!r}"
    formats = (
        "prompt and response | messages | conversations (ShareGPT) | prompt and completion | instruction and output"
    )
    raise _unknown(source[0], f"{formats} | text")


def _rl_rows(source: Rows, names: AbstractSet[str]) -> Recognized:
    name = next((name for name in _CONVERSATIONS if name in names), None)
    if name is not None and PROMPT_KEY not in names:
        rows = ConvertedRows(source, partial(_rl_conversation, name=name))
        return rows, "messages", _answer_column(rows[0].data), "conversations; sampling the next assistant turn"
    question = next((name for name in _QUESTIONS if name in names), None)
    if question is None:
        raise _unknown(source[0], "a prompt (a text or a list of messages), and an answer if the reward needs one")
    answer = _answer_column(source[0].data)
    description = "prompts without answers" if answer is None else f"prompts with {answer!r}"
    return _join_input(source, question), question, answer, description


def _pair_rows(source: Rows, names: AbstractSet[str]) -> Recognized:
    if not {"chosen", "rejected"} <= names:
        raise _unknown(source[0], "the columns chosen and rejected, each an answer or a conversation")
    if PROMPT_KEY in names and isinstance(source[0].data["chosen"], str):
        return source, PROMPT_KEY, RESPONSE_KEY, ""
    rows = ConvertedRows(source, _pair_conversations)
    return rows, None, None, "pairs of conversations; comparing their last turns"


def _answer_column(data: Mapping[str, Any]) -> str | None:
    if RESPONSE_KEY in data:
        return RESPONSE_KEY
    reward_model = data.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        return "reward_model.ground_truth"
    return next((name for name in _ANSWERS if name in data), None)


def _unknown(row: SourceRow, formats: str) -> DatasetError:
    return DatasetError(
        f"{row.where}: the columns {', '.join(map(repr, row.data)) or 'nothing'} belong to no known format; expected "
        f"{formats}; or name the columns: prompt_key=…, response_key=…"
    )


def _conversation(row: SourceRow, name: str) -> list[Message]:
    """Return the messages of a column, in OpenAI's format or ShareGPT's (`from` and `value`)."""
    turns = row.data.get(name)
    if isinstance(turns, str):
        try:
            turns = json.loads(turns)
        except ValueError:
            turns = None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, Mapping) for turn in turns):
        raise DatasetError(f"{row.where}: {name!r} is {turns!r:.80}; expected a list of messages")
    messages = []
    for turn in turns:
        if "role" in turn or "from" not in turn:
            messages.append(dict(turn))
            continue
        role = _SHAREGPT_ROLES.get(str(turn["from"]))
        if role is None:
            raise DatasetError(
                f"{row.where}: a turn is from {turn['from']!r}; expected one of {', '.join(_SHAREGPT_ROLES)}"
            )
        message = {key: value for key, value in turn.items() if key not in ("from", "value")}
        message |= {"role": role, "content": turn.get("value")}
        if turn["from"] == "function_call":
            message |= {"content": "", "tool_calls": [_sharegpt_call(row, turn.get("value"))]}
        messages.append(message)
    system = row.data.get("system")
    if isinstance(system, str) and system and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _sharegpt_call(row: SourceRow, value: Any) -> dict[str, Any]:
    try:
        return {"type": "function", "function": json.loads(value)}
    except (TypeError, ValueError):
        raise DatasetError(f"{row.where}: a function_call is {value!r:.80}; expected JSON with a name") from None


def _messages_column(row: SourceRow, convert: Callable[[SourceRow], list[Message]]) -> dict[str, Any]:
    return {**row.data, "messages": convert(row)}


def _messages_of(row: SourceRow, name: str, role: str) -> list[Message]:
    """Return a column that holds a text or messages, as messages; a text has the role `role`."""
    value = row.data.get(name)
    return [{"role": role, "content": value}] if isinstance(value, str) else _conversation(row, name)


def _prompt_completion(row: SourceRow) -> list[Message]:
    prompt = _messages_of(row, PROMPT_KEY, "user")
    return [*({**message, "weight": 0} for message in prompt), *_messages_of(row, "completion", "assistant")]


def _pair_conversations(row: SourceRow) -> dict[str, Any]:
    """Return a row with full conversations in `chosen` and `rejected`; answers are put after the column `prompt`."""
    pair = dict(row.data)
    for name in ("chosen", "rejected"):
        if isinstance(row.data.get(name), str) and PROMPT_KEY not in row.data:
            pair[name] = row.data[name]  # a transcript of hh_rlhf
            continue
        turns = _messages_of(row, name, "assistant")
        if PROMPT_KEY in row.data:
            prompt = _messages_of(row, PROMPT_KEY, "user")
            asked = [(turn.get("role"), turn.get("content")) for turn in turns]
            if (prompt[-1].get("role"), prompt[-1].get("content")) not in asked:
                turns = [*prompt, *turns]
            elif prompt[0].get("role") == "system" != turns[0].get("role"):
                turns = [prompt[0], *turns]
        pair[name] = turns
    return pair


def _join_input(source: Rows, question: str) -> Rows:
    """Return Alpaca rows with the column `input` after the instruction; other rows unchanged."""
    return ConvertedRows(source, _alpaca_row) if question == "instruction" else source


def _alpaca_row(row: SourceRow) -> dict[str, Any]:
    instruction, extra = row.data.get("instruction"), row.data.get("input")
    if not isinstance(instruction, str) or row.data.get("history"):
        name = "history" if isinstance(instruction, str) else "instruction"
        raise DatasetError(
            f"{row.where}: {name!r} is {row.data.get(name)!s:.80}; expected an instruction in one string, without "
            "history: write the turns into a column messages"
        )
    return {**row.data, "instruction": f"{instruction}\n\n{extra}" if extra else instruction}


def _rl_conversation(row: SourceRow, name: str) -> dict[str, Any]:
    """Return a row with a prompt; a last assistant turn becomes the answer, unless the row has one."""
    messages = _conversation(row, name)
    if messages[-1].get("role") != "assistant":
        return {**row.data, "messages": messages}
    prompt = {**row.data, "messages": messages[:-1]}
    return prompt if _answer_column(row.data) else prompt | {"answer": messages[-1].get("content")}
