"""Recognition of public row formats, which are converted to messages: OpenAI, ShareGPT, TRL, Alpaca, plain text.

A format is recognized by the columns of the first row, only if `prompt_key` and `response_key` are the defaults and the
row does not have these columns. Every row must have the same format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from archon.checkpoint.chat_template import Message
from archon.data.bad_rows import Policy
from archon.data.sources import SourceRow
from archon.schema.errors import DatasetError

Rows = Sequence[SourceRow]
Columns = Mapping[str, Any]

PROMPT_KEY, RESPONSE_KEY = "prompt", "response"
ENCODED = ("input_ids", "loss_mask")
SYSTEM = ("system", "system_prompt")
_CONVERSATIONS = ("messages", "conversations", "conversation")
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
_PAIR = ("chosen", "rejected")
_INPUTS = ("input", "context")  # of an instruction: Alpaca's name, Dolly's name
_QUESTIONS = ("prompt", "question", "problem", "instruction", "query")
_ANSWERS = ("answer", "solution", "ground_truth", "completion", "output")
_RESPONSES = ("response", "solution", "completion", "output", "answer", "ground_truth")  # SFT prefers a solution


class RowFormat(NamedTuple):
    """Columns of a dataset's rows, and the conversion of its rows to them.

    Attributes:
        prompt_key: column of the prompt, or of the conversation; None for pairs of conversations.
        response_key: column of the answer; None for conversations, and for RL rows without an answer.
        description: text for the log; empty for the columns of the configuration.
        columns: returns the columns to add to a row; None: rows are used unchanged.
        used: other source columns that are read.
    """

    prompt_key: str | None
    response_key: str | None
    description: str = ""
    columns: Callable[[SourceRow], Columns] | None = None
    used: tuple[str, ...] = ()

    def convert(self, row: SourceRow) -> SourceRow:
        """Return a row with the columns `prompt_key` and `response_key`."""
        return row if self.columns is None else SourceRow(row.where, {**row.data, **self.columns(row)})

    def unused(self, row: SourceRow) -> set[str]:
        """Return the columns of a source row that training does not read."""
        keys = {key.partition(".")[0] for key in self[:2] if key is not None}
        return row.data.keys() - keys - {*self[:2], *self.used, *SYSTEM, "tools", "images", "image"}


def recognize(source: Rows, kind: str, prompt_key: str | None, response_key: str | None, policy: Policy) -> RowFormat:
    """Return the format of rows.

    Args:
        source: rows.
        kind: "sft", "rl", "dpo" or "rw".
        prompt_key: configured column of the prompt.
        response_key: configured column of the response.
        policy: "skip" takes the format of the first row that has a known one.

    Raises:
        DatasetError: the first row has no known format, or no row has one if bad rows are skipped; names the
            formats.
    """
    names = source[0].data.keys()
    is_default = (prompt_key, response_key) == (PROMPT_KEY, RESPONSE_KEY)
    if kind == "sft" and names >= {*ENCODED}:
        return RowFormat(*ENCODED, "tokenized rows")
    if not is_default or {PROMPT_KEY, RESPONSE_KEY} <= names:
        return RowFormat(prompt_key, response_key)
    return _first_format({"sft": _sft_format, "rl": _rl_format}.get(kind, _pair_format), source, policy)


def _first_format(read: Callable[[SourceRow], RowFormat], source: Rows, policy: Policy) -> RowFormat:
    """Return the format of the first row; if bad rows are skipped, of the first row with a known format."""
    for row in source if policy == "skip" else ():
        try:
            return read(row)
        except DatasetError:
            continue
    return read(source[0])


def _sft_format(row: SourceRow) -> RowFormat:
    names = row.data.keys()
    if name := next((name for name in _CONVERSATIONS if name in names), None):
        return RowFormat("messages", None, "conversations", partial(_messages_column, name=name), (name,))
    if {PROMPT_KEY, "completion"} <= names:
        if isinstance(row.data[PROMPT_KEY], str) and isinstance(row.data["completion"], str):
            return RowFormat(PROMPT_KEY, "completion", "prompts with completions")
        description = "prompts with completions; training the completions"
        return RowFormat("messages", None, description, _prompt_completion, (PROMPT_KEY, "completion"))
    if {"instruction", "output"} <= names:
        return _question_format("instruction", "output", "instructions with outputs")
    if "text" in names:
        return RowFormat("text", None, "plain texts; training every token")
    for question, answer in product(_QUESTIONS, _RESPONSES):
        if {question, answer} <= names:
            return _question_format(question, answer, f"rows with {question!r} and {answer!r}")
    formats = (
        "prompt and response | messages | conversations (ShareGPT) | prompt and completion | instruction and output"
    )
    raise _unknown(row, f"{formats} | text (`archon preference` reads pairs of chosen and rejected answers)")


def _rl_format(row: SourceRow) -> RowFormat:
    names = row.data.keys()
    answer = _answer_column(row.data)
    name = next((name for name in _CONVERSATIONS if name in names), None)
    if name is not None and PROMPT_KEY not in names:
        gold = "a last assistant turn is the gold answer" if answer is None else f"the gold answer is {answer!r}"
        columns = partial(_rl_conversation, name=name, has_answer=answer is not None)
        return RowFormat("messages", answer, f"conversations; sampling the next assistant turn; {gold}", columns)
    question = next((name for name in _QUESTIONS if name in names), None)
    if question is None:
        raise _unknown(row, "a prompt (a text or a list of messages), and an answer if the reward needs one")
    description = "prompts without answers" if answer is None else f"prompts with {answer!r}"
    return _question_format(question, answer, description)


def _pair_format(row: SourceRow) -> RowFormat:
    names = row.data.keys()
    if not {*_PAIR} <= names:
        raise _unknown(row, "the columns chosen and rejected, each an answer or a conversation")
    chosen = row.data["chosen"]
    if isinstance(chosen, str) and chosen.startswith("\n\nHuman:"):  # a transcript of hh_rlhf has its prompt
        return RowFormat(None, None, "pairs of transcripts; comparing their last turns")
    # `messages` next to two conversations is one of them; next to two answers it is the prompt.
    prompts = _QUESTIONS if isinstance(chosen, list) else (*_QUESTIONS, *_CONVERSATIONS)
    prompt = next((name for name in prompts if name in names), None)
    if isinstance(chosen, str) and prompt in _QUESTIONS:
        return _question_format(prompt, None, "" if prompt == PROMPT_KEY else f"pairs with {prompt!r}")
    columns = partial(_pair_conversations, prompt_column=prompt)
    description = "pairs of conversations; comparing their last turns"
    return RowFormat(None, None, description, columns, () if prompt is None else (prompt,))


def _question_format(question: str, answer: str | None, description: str) -> RowFormat:
    """Return the format of rows with a question; an instruction also includes the input and the history of its row."""
    if question != "instruction":
        return RowFormat(question, answer, description)
    return RowFormat(question, answer, description, _instruction_column, (*_INPUTS, "history"))


def _answer_column(data: Columns) -> str | None:
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
    if isinstance(turns, Mapping):
        turns = [turns]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, Mapping) for turn in turns):
        raise DatasetError(f"{row.where}: {name!r} is {turns!r:.80}; expected a list of messages")
    messages = []
    for turn in turns:
        speaker = turn.get("role", turn.get("from"))
        role = _SHAREGPT_ROLES.get(str(speaker).lower(), speaker if "role" in turn else None)
        if role is None:
            raise DatasetError(
                f"{row.where}: a turn is from {speaker!r:.80}; expected one of {', '.join(_SHAREGPT_ROLES)} in its "
                "field 'from', or a field 'role'"
            )
        if role == turn.get("role") and "content" in turn:
            messages.append(dict(turn))
            continue
        message = {key: value for key, value in turn.items() if key not in ("role", "from", "value")}
        message = {"role": role, "content": turn.get("value"), **message}
        if str(speaker).lower() == "function_call":
            message |= {"content": "", "tool_calls": [_sharegpt_call(row, turn.get("value"))]}
        messages.append(message)
    return messages


def _sharegpt_call(row: SourceRow, value: Any) -> dict[str, Any]:
    try:
        return {"type": "function", "function": json.loads(value)}
    except (TypeError, ValueError):
        raise DatasetError(f"{row.where}: a function_call is {value!r:.80}; expected JSON with a name") from None


def _messages_of(row: SourceRow, name: str, role: str) -> list[Message]:
    """Return the messages of a column; a text becomes one message with the role `role`."""
    value = row.data.get(name)
    return [{"role": role, "content": value}] if isinstance(value, str) else _conversation(row, name)


def _messages_column(row: SourceRow, name: str) -> Columns:
    return {"messages": _conversation(row, name)}


def _prompt_completion(row: SourceRow) -> Columns:
    prompt = [{**message, "weight": 0} for message in _messages_of(row, PROMPT_KEY, "user")]
    return {"messages": [*prompt, *_messages_of(row, "completion", "assistant")]}


def _pair_conversations(row: SourceRow, prompt_column: str | None) -> Columns:
    """Return `chosen` and `rejected` as full conversations, with the prompt if they hold only answers."""
    pair: dict[str, list[Message] | str] = {}
    for name in _PAIR:
        if isinstance(row.data.get(name), str) and prompt_column is None:
            pair[name] = row.data[name]  # a transcript of hh_rlhf
            continue
        turns = _messages_of(row, name, "assistant")
        if prompt_column is not None:
            prompt = _messages_of(row, prompt_column, "user")
            question = (prompt[-1]["role"], _stripped(prompt[-1]["content"]))
            if turns[0]["role"] not in ("user", "system"):
                turns = [*prompt, *turns]
            elif question not in [(turn["role"], _stripped(turn["content"])) for turn in turns]:
                raise DatasetError(
                    f"{row.where}: the conversation {name!r} does not contain {prompt_column!r}, {question[1]!r:.80}; "
                    f"expected the same question, or remove the column {prompt_column!r}"
                )
            elif prompt[0]["role"] == "system" != turns[0]["role"]:
                turns = [prompt[0], *turns]
        pair[name] = turns
    return pair


def _stripped(content: Any) -> Any:
    return content.strip() if isinstance(content, str) else content


def _instruction_column(row: SourceRow) -> Columns:
    """Return the instruction of an Alpaca row: the turns of its history, then the instruction with its input."""
    instruction, history = row.data.get("instruction"), row.data.get("history") or []
    if not isinstance(instruction, str):
        raise DatasetError(f"{row.where}: 'instruction' is {instruction!s:.80}; expected an instruction in one string")
    parts = [instruction]
    for name in _INPUTS:
        value = row.data.get(name)
        if value is None or value == "" or value != value:  # NaN, which pandas writes for an empty cell
            continue
        if not isinstance(value, str | int | float):
            raise DatasetError(f"{row.where}: {name!r} is {value!r:.80}; expected the input of an instruction as text")
        parts.append(str(value))
    text = "\n\n".join(parts)
    if not history:
        return {"instruction": text}
    messages: list[Message] = []
    for turn in history if isinstance(history, list) else [history]:
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(part, str) for part in turn)):
            raise DatasetError(f"{row.where}: 'history' holds {turn!r:.80}; expected pairs [question, answer]")
        messages += [{"role": role, "content": part} for role, part in zip(("user", "assistant"), turn, strict=True)]
    # Clear the column: `reject_unsupported_columns` would refuse it.
    return {"instruction": [*messages, {"role": "user", "content": text}], "history": None}


def _rl_conversation(row: SourceRow, name: str, has_answer: bool) -> Columns:
    """Return the prompt of a conversation; a last assistant turn becomes the answer, unless the row has one."""
    messages = _conversation(row, name)
    last = messages[-1]
    if last["role"] != "assistant":
        return {"messages": messages}
    prompt: dict[str, Any] = {"messages": messages[:-1]}
    return prompt if has_answer else prompt | {"answer": last["content"] or last.get("tool_calls")}
