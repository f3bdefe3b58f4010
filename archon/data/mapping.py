"""SFT and RL rows of any dataset, by the names of its columns."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from archon.checkpoint.chat_template import Message, stop_token_ids
from archon.data.encoding import SFTText, TurnOptions, encode_prompt, encode_sft, plain_prompt, sft_text
from archon.data.formats import ENCODED, recognize
from archon.data.image_rows import (
    IMAGE,
    SFTExpander,
    encode_image_prompt,
    image_sources,
    insert_image_parts,
    require_image_template,
)
from archon.data.images import ImageReader
from archon.data.rows import RowDataset
from archon.data.sources import SourceRow, column_value
from archon.data.token_rows import TokenRows, encode_rows, row_lengths
from archon.schema.errors import DatasetError

logger = logging.getLogger(__name__)


def rl_dataset(
    source: Sequence[SourceRow],
    name: str,
    *,
    prompt_key: str,
    response_key: str | None,
    system_prompt: str | None = None,
    instruction: str | None = None,
    tokenizer: Any = None,
    max_length: int | None = None,
    reader: ImageReader | None = None,
) -> RowDataset:
    """Return RL rows: `messages`, `prompt` (the same as plain text), `answer`, and the source's other columns.

    With the default columns, public formats are recognized, see `recognize`; rows may then have no answer.

    Args:
        source: rows.
        name: name of the dataset, for messages.
        tokenizer: tokenizer of the model.
        prompt_key: column with the prompt: a string, or a list of messages.
        response_key: column with the gold answer; None: the rows have no `answer`, unless a column has this name.
        system_prompt: prepended to conversations without a system message.
        instruction: appended to the last user message, on a new line.
        max_length: drop prompts with more tokens; needs `tokenizer`.
        reader: image reader of a vision-language model: the column `images` has images, and `messages` their
        placeholders
            (`<image>` in the text). Without a reader the column is like any other.

    Raises:
        DatasetError: a column is missing or empty (names it, the file and the line), or every row is too long.
    """
    rows = []
    configured = response_key
    source = list(source)
    column = next((column for column in ("images", "image") if any(row.data.get(column) for row in source)), None)
    if reader is None and column is not None:
        logger.warning("%s: the model reads no images; column %r goes to the reward alone", name, column)
    recognized, prompt_key, response_key = _recognize(source, name, "rl", prompt_key, response_key)
    for row in recognized:
        messages = conversation(row, prompt_key, system_prompt, instruction)
        gold = {}
        if response_key is not None:
            # A recognized column may be empty in some rows; the reward decides whether it needs an answer.
            value_of = require_column if response_key == configured else column_value
            answer = value_of(row, response_key)
            if isinstance(answer, (int, float)) and not isinstance(answer, bool):
                answer = str(answer)
            if isinstance(answer, str):
                _require_text(answer, response_key, row.where)
            gold["answer"] = answer
        prompt = plain_prompt(messages)
        if reader is not None and (sources := image_sources(row.data)):
            messages = insert_image_parts(messages, len(sources), row.where)
        extra = {key: value for key, value in row.data.items() if key not in (prompt_key, configured)}
        rows.append({**extra, "messages": messages, "prompt": prompt, **gold})
    if max_length is None:
        return RowDataset(name, rows)
    if tokenizer is None:
        raise DatasetError(f"max_length is {max_length} for dataset {name}, in tokens; pass a tokenizer too")
    lengths = [
        len(encode_image_prompt(tokenizer, row, reader)[0] if reader else encode_prompt(tokenizer, row)) for row in rows
    ]
    return drop_long_rows(name, rows, lengths, max_length)


def sft_dataset(
    source: Sequence[SourceRow],
    name: str,
    *,
    tokenizer: Any,
    prompt_key: str,
    response_key: str | None,
    system_prompt: str | None = None,
    instruction: str | None = None,
    max_length: int | None = None,
    reader: ImageReader | None = None,
    turns: TurnOptions | None = None,
) -> RowDataset:
    """Return SFT rows `{"input_ids", "loss_mask"}`, by the chat template if the tokenizer has one, else as plain text.

    With the default columns, public formats are recognized, see `recognize`. Rows that already have these two columns
    are used as they are, see `encoded_rows`. A column `tools` may hold the functions of a conversation, in OpenAI's
    format, for the chat template.

    Args:
        source: rows.
        tokenizer: tokenizer of the model.
        name: name of the dataset, for messages.
        prompt_key: column with the prompt: a string, or a list of messages.
        response_key: column with the response; None if the prompt column holds full conversations.
        system_prompt: as in `rl_dataset`.
        instruction: as in `rl_dataset`.
        max_length: drop examples with more tokens.
        turns: which turns of a conversation are trained, and whether long ones are cut after a turn.
        reader: image reader of a vision-language model: rows with a column `images` keep it, with one placeholder per
            image token.
    """
    source, prompt_key, response_key = _recognize(source, name, "sft", prompt_key, response_key)
    encode = partial(
        _sft_rows,
        tokenizer=tokenizer,
        prompt_key=prompt_key,
        response_key=response_key,
        system_prompt=system_prompt,
        instruction=instruction,
        max_length=max_length,
        reader=reader,
        turns=turns,
    )
    rows = encode_rows(source, encode, name) if reader is None else encode(source)
    if max_length is None:
        return RowDataset(name, rows)
    return drop_long_rows(name, rows, row_lengths(rows, ["input_ids"]), max_length)


def _sft_rows(
    source: Sequence[SourceRow],
    *,
    tokenizer: Any,
    prompt_key: str,
    response_key: str | None,
    system_prompt: str | None,
    instruction: str | None,
    max_length: int | None,
    reader: ImageReader | None,
    turns: TurnOptions | None,
) -> list[dict[str, Any]]:
    if all(column in source[0].data for column in ENCODED):
        rows = encoded_rows(source)
    elif prompt_key == "text" and response_key is None and isinstance(source[0].data["text"], str):
        texts = [(row.where, _text(row)) for row in source]
        rows = encode_sft(tokenizer, [SFTText(where, text, ((0, len(text)),), plain=True) for where, text in texts])
    else:
        examples, row_images = [], []
        for row in source:
            require_no_intent(row, reader)
            messages = conversation(row, prompt_key, system_prompt, instruction)
            row_images.append(image_sources(row.data) if reader else [])
            if row_images[-1]:
                require_image_template(tokenizer, row.where)
                messages = insert_image_parts(messages, len(row_images[-1]), row.where)
            if response_key is not None:
                messages.append(assistant_message(row, response_key))
            examples.append(sft_text(tokenizer, messages, row.where, row.data.get("tools"), turns))
        rows = encode_sft(tokenizer, examples)
        if reader is not None:
            candidates = zip(rows, row_images, source, strict=True)
            expander = SFTExpander(reader)
            rows = [expander.expand(row, images, origin.where) for row, images, origin in candidates]
    if max_length is not None and turns is not None and turns.long_rows == "truncate":
        stops = frozenset(stop_token_ids(tokenizer))
        rows = [_truncate_turns(row, max_length, stops) for row in rows]
    return rows


def _recognize(
    source: Sequence[SourceRow], name: str, kind: str, prompt_key: str, response_key: str | None
) -> tuple[Sequence[SourceRow], str, str | None]:
    source, prompt, response, description = recognize(source, kind, prompt_key, response_key)
    if description:
        logger.warning("%s: reading %s", name, description)
    assert prompt is not None  # only pairs have conversations in two columns
    return source, prompt, response


def _text(row: SourceRow) -> str:
    text = require_column(row, "text")
    if not isinstance(text, str):
        raise DatasetError(f"{row.where}: 'text' is a {type(text).__name__}; expected a string")
    return text


def _truncate_turns(row: dict[str, Any], max_length: int, stops: Collection[int]) -> dict[str, Any]:
    """Cut a row after its last trained stop token within `max_length`, which ends a turn; unchanged if none is."""
    ids, mask = row["input_ids"], row["loss_mask"]
    if len(ids) <= max_length or "images" in row:
        return row
    ends = (end for end in range(max_length, 0, -1) if mask[end - 1] == 1 and mask[end] == 0 and ids[end - 1] in stops)
    end = next(ends, None)
    return row if end is None else {"input_ids": ids[:end], "loss_mask": mask[:end]}


# Columns that would change what is trained, and that neither SFT nor pairs support.
_INTENT = (
    "weight",
    "loss_weight",
    "sample_weight",
    "mask",
    "train_mask",
    "image",
    "images",
    "video",
    "videos",
    "audio",
)


def require_no_intent(row: SourceRow, reader: ImageReader | None = None) -> None:
    """Raise DatasetError for a column with a value that training would have to honor, such as a weight of the row."""
    for column in _INTENT:
        if row.data.get(column) is None or (reader is not None and column in ("image", "images")):
            continue
        raise DatasetError(
            f"{row.where}: column {column!r} is {str(row.data[column])[:60]!r}, and this training does not use it; "
            "remove the column to train without it"
        )


def encoded_rows(source: Sequence[SourceRow]) -> list[dict[str, list[int]]]:
    """Return the columns `input_ids` and `loss_mask` of rows that a loader has encoded, as lists of int.

    Raises:
        DatasetError: a column is missing, the lengths differ, a mask has other values than 0 and 1, or no token is
            trained; names the row.
    """
    rows = []
    for row in source:
        ids, mask = ([int(value) for value in require_column(row, column)] for column in ENCODED)
        if len(ids) != len(mask):
            raise DatasetError(
                f"{row.where}: {len(ids)} input_ids but {len(mask)} values of loss_mask; expected equal lengths"
            )
        if not {*mask} <= {0, 1} or 1 not in mask:
            raise DatasetError(f"{row.where}: loss_mask must be 1 on trained tokens (at least one) and 0 elsewhere")
        rows.append({"input_ids": ids, "loss_mask": mask})
    return rows


def drop_long_rows(name: str, rows: Sequence[dict[str, Any]], lengths: Sequence[int], max_length: int) -> RowDataset:
    """Return the rows of at most `max_length` tokens, and log how many were dropped.

    Raises:
        DatasetError: all rows are longer.
    """
    numbers = [number for number, length in enumerate(lengths) if length <= max_length]
    kept = rows.select(numbers) if isinstance(rows, TokenRows) else [rows[number] for number in numbers]
    n_filtered = len(rows) - len(kept)
    if not kept:
        raise DatasetError(
            f"all {len(rows)} rows of {name} are longer than max_length={max_length} tokens (the shortest has "
            f"{min(lengths)}); raise max_length"
        )
    if n_filtered:
        what = f"{n_filtered} of {len(rows)} rows that are longer than max_length={max_length} tokens"
        logger.warning("%s: dropped %s", name, what)
    return RowDataset(name, kept, n_filtered)


def require_column(row: SourceRow, key: str) -> Any:
    """Return the value of a column (see `column_value`); raise DatasetError if it is missing, empty or NaN."""
    value = column_value(row, key)
    if value is None or value == "":
        raise DatasetError(f"{row.where}: {key!r} is empty; expected a value")
    if isinstance(value, float) and math.isnan(value):
        raise DatasetError(f"{row.where}: {key!r} is NaN; expected a value")
    return value


def assistant_message(row: SourceRow, key: str) -> Message:
    """Return the string of a column as an assistant's message. Raises DatasetError for another type."""
    content = require_column(row, key)
    if not isinstance(content, str):
        raise DatasetError(f"{row.where}: {key!r} is a {type(content).__name__}; expected a string")
    return {"role": "assistant", "content": content}


def _require_text(value: str, key: str, where: str) -> None:
    """Raise DatasetError for half of a surrogate pair, which JSON's escapes allow but no text contains."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DatasetError(
            f"{where}: {key!r} holds half of a surrogate pair at character {error.start}, which is no text: "
            f"{value[:80]!a}"
        ) from None


def conversation(row: SourceRow, prompt_key: str, system_prompt: str | None, instruction: str | None) -> list[Message]:
    """Return the messages of a column that holds a string or a list of messages; arguments as in `rl_dataset`."""
    prompt = require_column(row, prompt_key)
    if isinstance(prompt, str):
        messages: list[Message] = [{"role": "user", "content": prompt}]
    else:
        if not (isinstance(prompt, list) and prompt and all(map(_is_message, prompt))):
            raise DatasetError(
                f"{row.where}: {prompt_key!r} must be a string or a list of messages {{'role': …, 'content': …}}"
            )
        messages = [{**message, "content": _content(message, row.where)} for message in prompt]
    system = row.data.get("system")
    system_prompt = system if isinstance(system, str) and prompt_key != "system" else system_prompt
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    asked = [message for message in messages if message["role"] == "user"]
    if instruction and asked:
        asked[-1]["content"] = f"{asked[-1]['content']}\n{instruction}"
    return messages


def _is_message(message: Any) -> bool:
    """Return whether it is a message: a role, and a text, content parts, or (assistant only) None."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    if isinstance(content, list):
        return all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content)
    return isinstance(content, str) or (content is None and message["role"] == "assistant")


def _content(message: Message, where: str) -> str:
    """Return the content of a message as text, with `<image>` for image parts without data; None as an empty text.

    Raises:
        DatasetError: a part is neither text nor an image placeholder.
    """
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part["type"] == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif part["type"] == "image" and part.keys() <= {"type", "text"}:
            texts.append(IMAGE)
        else:
            raise DatasetError(
                f"{where}: a message has the content part {part!r:.80}; expected {{'type': 'text', 'text': …}}, or "
                "{'type': 'image'} with the image in the column 'images'"
            )
    return "".join(texts)
