"""SFT and RL rows of any dataset, by the names of its columns."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from archon.checkpoint.chat_template import (
    THINKING_FIELDS,
    Message,
    chat_template,
    has_chat_template,
    stop_token_ids,
    unknown_variable,
)
from archon.data.bad_rows import BadRows, Notes, Policy
from archon.data.encoding import SFTText, TurnOptions, encode_prompt, encode_sft, plain_prompt, sft_text
from archon.data.formats import ENCODED, SYSTEM, RowFormat, recognize
from archon.data.image_rows import (
    IMAGE,
    SFTExpander,
    encode_image_prompt,
    image_sources,
    insert_image_parts,
    require_image_template,
)
from archon.data.images import ImageReader
from archon.data.rows import LocatedRow, RowDataset
from archon.data.sources import SourceRow, column_value, has_column
from archon.data.token_rows import TokenRows, encode_rows, row_lengths
from archon.schema.errors import DatasetError

logger = logging.getLogger(__name__)

COLUMN, TURNS, THINKING = "column", "turns", "thinking"  # kinds of notes


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
    bad_rows: Policy = "refuse",
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
            placeholders (`<image>` in the text). Without a reader the column is like any other.
        bad_rows: "skip" leaves out rows that cannot be used, also prompts that the chat template refuses.

    Raises:
        DatasetError: a column is missing or empty (names it, the file and the line), or every row is too long.
    """
    source = [*source]
    column = next((column for column in ("images", "image") if any(row.data.get(column) for row in source)), None)
    if reader is None and column is not None:
        logger.warning("%s: the model reads no images; column %r goes to the reward alone", name, column)
    if max_length is not None and tokenizer is None:
        raise DatasetError(f"max_length is {max_length} for dataset {name}, in tokens; pass a tokenizer too")
    bad = BadRows(bad_rows)
    row_format = recognize(source, "rl", prompt_key, response_key, bad_rows)
    log_format(name, source, row_format)
    recognized = bad.convert(source, lambda part, notes: [row_format.convert(row) for row in part])
    if row_format.columns is not None and any("answer" in row.data for row in recognized):
        # The answers are the last turns of the conversations, unless a column has them.
        row_format = row_format._replace(response_key=row_format.response_key or "answer")
    is_rendered = tokenizer is not None and (max_length is not None or bad_rows == "skip")

    def convert(part: Sequence[SourceRow], notes: Notes) -> list[tuple[dict[str, Any], int]]:
        rows = [_rl_row(row, row_format, response_key, system_prompt, instruction, reader) for row in part]
        if not is_rendered:
            return [(row, 0) for row in rows]
        if reader is not None:
            return [(row, len(encode_image_prompt(tokenizer, row, reader)[0])) for row in rows]
        return [(row, len(encode_prompt(tokenizer, row))) for row in rows]

    converted = bad.convert(recognized, convert)
    bad.report(name, converted)
    dataset = RowDataset(name, [row for row, _ in converted], n_skipped=len(bad.errors))
    return dataset if max_length is None else drop_long_rows(dataset, [length for _, length in converted], max_length)


def _rl_row(
    row: SourceRow,
    row_format: RowFormat,
    configured: str | None,
    system_prompt: str | None,
    instruction: str | None,
    reader: ImageReader | None,
) -> dict[str, Any]:
    """Return an RL row; `configured` is the column of the answer that the user named."""
    prompt_key, response_key = row_format.prompt_key, row_format.response_key
    assert prompt_key is not None
    messages = conversation(row, prompt_key, system_prompt, instruction)
    if messages[-1]["role"] == "assistant":
        raise DatasetError(
            f"{row.where}: the prompt ends with an assistant turn, and RL samples the next one; remove the turn, or "
            "read the column 'messages' with the default keys, which takes a last assistant turn as the gold answer"
        )
    gold = {}
    if response_key is not None:
        # A recognized column may be empty in some rows; the reward decides whether it needs an answer.
        value_of = require_column if response_key == configured else _optional
        answer = _gold_answer(value_of(row, response_key))
        if isinstance(answer, str):
            _require_text(answer, response_key, row.where)
        gold["answer"] = answer
    prompt = plain_prompt(messages)
    _require_text(prompt, prompt_key, row.where)
    if reader is not None and (sources := image_sources(row.data)):
        messages = insert_image_parts(messages, len(sources), row.where)
    extra = {key: value for key, value in row.data.items() if key not in (prompt_key, configured)}
    return LocatedRow(row.where, {**extra, "messages": messages, "prompt": prompt, **gold})


def _gold_answer(answer: Any) -> Any:
    """Return a gold answer, with numbers, messages (the last one) and text parts as text."""
    if isinstance(answer, list) and answer and all(map(_is_message, answer)):
        answer = answer[-1].get("content")
    if isinstance(answer, list) and answer and all(map(_is_text_part, answer)):
        return "".join(part["text"] for part in answer)
    return str(answer) if isinstance(answer, (int, float)) and not isinstance(answer, bool) else answer


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
    bad_rows: Policy = "refuse",
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
        bad_rows: "skip" leaves out rows that cannot be used.
    """
    bad = BadRows(bad_rows)
    row_format = recognize(source, "sft", prompt_key, response_key, bad_rows)
    log_format(name, source, row_format)
    encode = partial(
        _sft_rows,
        row_format=row_format,
        tokenizer=tokenizer,
        system_prompt=system_prompt,
        instruction=instruction,
        max_length=max_length,
        reader=reader,
        turns=turns,
    )
    rows = encode_rows(source, encode, name, bad) if reader is None else bad.convert(source, encode)
    bad.report(name, rows)
    log_notes(name, len(source), bad.notes, tokenizer)
    dataset = RowDataset(name, rows, n_skipped=len(bad.errors))
    return dataset if max_length is None else drop_long_rows(dataset, row_lengths(rows, ["input_ids"]), max_length)


def _sft_rows(
    source: Sequence[SourceRow],
    notes: Notes,
    *,
    row_format: RowFormat,
    tokenizer: Any,
    system_prompt: str | None,
    instruction: str | None,
    max_length: int | None,
    reader: ImageReader | None,
    turns: TurnOptions | None,
) -> list[dict[str, Any]]:
    prompt_key, response_key = row_format.prompt_key, row_format.response_key
    assert prompt_key is not None  # only pairs have none
    notes.update((COLUMN, column) for row in source for column in row_format.unused(row))
    source = [row_format.convert(row) for row in source]
    if (prompt_key, response_key) == ENCODED:
        rows = encoded_rows(source, getattr(tokenizer, "checkpoint_vocab_size", None))
    elif prompt_key == "text" and response_key is None and isinstance(source[0].data.get("text"), str):
        texts = [(row.where, _text(row)) for row in source]
        rows = encode_sft(tokenizer, [SFTText(where, text, ((0, len(text)),), plain=True) for where, text in texts])
    else:
        examples, row_images = [], []
        for row in source:
            reject_unsupported_columns(row, reader)
            if str(row.data.get("label")).lower() == "false":  # a text in CSV
                raise DatasetError(
                    f"{row.where}: 'label' is false, which marks an unwanted answer (KTO), and SFT would learn it; "
                    "keep only rows with label true, or train on pairs of chosen and rejected answers"
                )
            messages = conversation(row, prompt_key, system_prompt, instruction)
            if response_key is None and isinstance(turns_column := column_value(row, prompt_key), list):
                notes.update((TURNS, note) for note in _turn_notes(turns_column))
            row_images.append(image_sources(row.data) if reader else [])
            if row_images[-1]:
                require_image_template(tokenizer, row.where)
                messages = insert_image_parts(messages, len(row_images[-1]), row.where)
            if response_key is not None:
                messages.append(assistant_message(row, response_key))
            notes[THINKING, ""] += has_thinking(messages)
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


def log_format(name: str, source: Sequence[SourceRow], row_format: RowFormat) -> None:
    """Log the rows and their format, unless the configuration names the columns."""
    if row_format.description:
        logger.warning("%s: reading %s %s", name, f"{len(source):,}", row_format.description)


def log_notes(name: str, total: int, notes: Notes, tokenizer: Any) -> None:
    """Log the notes on rows: unused columns, unusual turns, and missing thinking after a prompt that opens it."""
    if columns := sorted(column for kind, column in notes if kind == COLUMN):
        logger.warning("%s: columns that are not used: %s", name, ", ".join(columns))
    if unusual := [f"{count} {note}" for (kind, note), count in notes.items() if kind == TURNS]:
        logger.warning("%s: of %d conversations, %s", name, total, "; ".join(unusual))
    if not has_chat_template(tokenizer) or notes[THINKING, ""]:
        return
    if not chat_template(tokenizer).opens_thinking:
        return
    has_switch = unknown_variable(json.dumps(tokenizer.chat_template), ["enable_thinking"]) is None
    switch = "set chat_template_kwargs={enable_thinking: false}, which the export keeps"
    choice = switch if has_switch else "use a template that does not open thinking"
    logger.warning(
        "%s: the generation prompt of the chat template ends with <think>, but no row has thinking: the model learns "
        "to answer without thinking, after a prompt that opens it; %s, or add thinking to the rows",
        *(name, choice),
    )


def has_thinking(messages: Sequence[Message]) -> bool:
    """Return whether any message has thinking, in a field or in its text."""
    return any("</think>" in message["content"] or any(map(message.get, THINKING_FIELDS)) for message in messages)


def _turn_notes(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return notes on unusual turns of a conversation."""
    roles = [message["role"] for message in messages]
    notes = {
        "start with an assistant turn, which has no prompt and is not trained": roles[0] == "assistant",
        "end with a user turn, which has no answer": roles[-1] == "user",
        "have an empty assistant turn, which is trained": any(map(_is_empty_answer, messages)),
        "have two turns of one role in succession": any(
            first == second in ("user", "assistant") for first, second in pairwise(roles)
        ),
    }
    return [note for note, is_present in notes.items() if is_present]


def _is_empty_answer(message: Mapping[str, Any]) -> bool:
    if message["role"] != "assistant" or any(map(message.get, ("content", "tool_calls", *THINKING_FIELDS))):
        return False
    return all(message.get(name) in (None, 1) for name in ("weight", "train"))


def _text(row: SourceRow) -> str:
    text = require_column(row, "text")
    if not isinstance(text, str):
        raise DatasetError(f"{row.where}: 'text' is a {type(text).__name__}; expected a string")
    return text


def _truncate_turns(row: dict[str, Any], max_length: int, stops: Collection[int]) -> dict[str, Any]:
    """Cut a row after the last trained turn that ends within `max_length`; return it unchanged if there is none."""
    ids, mask = row["input_ids"], row["loss_mask"]
    if len(ids) <= max_length or "images" in row:
        return row
    ends = (end for end in range(max_length, 0, -1) if mask[end - 1] == 1 and mask[end] == 0 and ids[end - 1] in stops)
    end = next(ends, None)
    return row if end is None else {"input_ids": ids[:end], "loss_mask": mask[:end]}


# Columns that should change training, and that neither SFT nor pairs support.
_UNSUPPORTED_COLUMNS = (
    "weight",
    "loss_weight",
    "sample_weight",
    "mask",
    "train_mask",
    "loss_mask",
    "history",
    "chat_template_kwargs",
    "image",
    "images",
    "video",
    "videos",
    "audio",
)


def reject_unsupported_columns(row: SourceRow, reader: ImageReader | None = None) -> None:
    """Raise DatasetError for a column that should change training but is not supported, such as a row weight."""
    for column in _UNSUPPORTED_COLUMNS:
        if row.data.get(column) in (None, [], "") or (reader is not None and column in ("image", "images")):
            continue
        raise DatasetError(
            f"{row.where}: column {column!r} is {str(row.data[column])[:60]!r}, which this training does not support; "
            "remove the column to train without it"
        )


def encoded_rows(
    source: Sequence[SourceRow], vocab_size: int | None = None, columns: Sequence[tuple[str, str]] = (ENCODED,)
) -> list[dict[str, list[int]]]:
    """Return the columns of token ids and their loss masks of rows that a loader has encoded, as lists of int.

    Args:
        source: rows.
        vocab_size: vocabulary size of the model; by default 2^31, as ids are stored in 32 bits.
        columns: names of the columns: token ids, and the mask of the trained ones.

    Raises:
        DatasetError: a column is missing, an id is not in the vocabulary, the lengths differ, a mask has other values
            than 0 and 1, or no token is trained; names the row.
    """
    rows = []
    for row in source:
        encoded: dict[str, list[int]] = {}
        for ids_column, mask_column in columns:
            ids = _whole_numbers(row, ids_column, is_id=True)
            mask = _whole_numbers(row, mask_column)
            if wrong := next((token for token in ids if not 0 <= token < (vocab_size or 2**31)), None):
                known = f"the model's vocabulary of {vocab_size:,}" if vocab_size else "0 to 2^31 - 1"
                shown = wrong if abs(wrong) < 2**63 else "of more than 64 bits"
                raise DatasetError(f"{row.where}: {ids_column!r} has the token id {shown}, outside {known}")
            if len(ids) != len(mask):
                raise DatasetError(
                    f"{row.where}: {len(ids)} {ids_column} but {len(mask)} values of {mask_column}; expected equal "
                    "lengths"
                )
            if not {*mask} <= {0, 1} or 1 not in mask:
                raise DatasetError(
                    f"{row.where}: {mask_column} must be 1 on trained tokens (at least one) and 0 elsewhere"
                )
            encoded |= {ids_column: ids, mask_column: mask}
        rows.append(encoded)
    return rows


def _whole_numbers(row: SourceRow, column: str, *, is_id: bool = False) -> list[int]:
    """Return a column of whole numbers. Booleans are accepted in a mask, and refused as token ids."""
    values = require_column(row, column)
    try:
        numbers = [int(value) for value in values]
        is_exact = all(number == value for number, value in zip(numbers, values, strict=True))
        is_exact = is_exact and not (is_id and any(isinstance(value, bool) for value in values))
    except (TypeError, ValueError, OverflowError):
        is_exact = False
    if not is_exact:
        raise DatasetError(f"{row.where}: {column!r} is {values!s:.80}; expected a list of whole numbers")
    return numbers


def drop_long_rows(dataset: RowDataset, lengths: Sequence[int], max_length: int) -> RowDataset:
    """Return the rows of at most `max_length` tokens, and log how many were dropped.

    Raises:
        DatasetError: all rows are longer.
    """
    name, rows = dataset.name, dataset.rows
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
    return replace(dataset, rows=kept, n_filtered=n_filtered)


def require_column(row: SourceRow, key: str) -> Any:
    """Return the value of a column (see `column_value`); raise DatasetError if it is missing, empty or NaN."""
    value = column_value(row, key)
    if value is None or value == "":
        raise DatasetError(f"{row.where}: {key!r} is empty; expected a value")
    if isinstance(value, float) and math.isnan(value):
        raise DatasetError(f"{row.where}: {key!r} is NaN; expected a value")
    return value


def _optional(row: SourceRow, key: str) -> Any:
    """Return the value of a column; None if it is missing or NaN."""
    value = column_value(row, key) if has_column(row, key) else None
    return None if isinstance(value, float) and math.isnan(value) else value


def assistant_message(row: SourceRow, key: str) -> Message:
    """Return the string of a column as an assistant's message. Raises DatasetError for another type."""
    content = require_column(row, key)
    if not isinstance(content, str):
        raise DatasetError(f"{row.where}: {key!r} is a {type(content).__name__}; expected a string")
    return {"role": "assistant", "content": content}


def _require_text(value: str, key: str, where: str) -> None:
    """Raise DatasetError for a lone surrogate: JSON can escape one, but it cannot be encoded as UTF-8."""
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
    systems = [row.data.get(name) for name in SYSTEM if name != prompt_key]
    system_prompt = next((system for system in systems if isinstance(system, str) and system), system_prompt)
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    asked = [message for message in messages if message["role"] == "user"]
    if instruction and asked:
        asked[-1]["content"] = f"{asked[-1]['content']}\n{instruction}"
    return messages


def _is_message(message: Any) -> bool:
    """Return whether a value has a role and a valid content: text, content parts, or (assistant only) None."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    if isinstance(content, list):
        return all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content)
    return isinstance(content, str) or (content is None and message["role"] == "assistant")


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


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
        if _is_text_part(part):
            texts.append(part["text"])
        elif part["type"] == "image" and part.keys() <= {"type", "text"}:
            texts.append(IMAGE)
        else:
            raise DatasetError(
                f"{where}: a message has the content part {part!r:.80}; expected {{'type': 'text', 'text': …}}, or "
                "{'type': 'image'} with the image in the column 'images'"
            )
    return "".join(texts)
