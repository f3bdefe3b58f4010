"""Answers that are labeled as desirable or undesirable, for KTO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from archon.data.bad_rows import BadRows, Notes, Policy
from archon.data.encoding import TurnOptions, encode_sft, sft_text
from archon.data.formats import RowFormat, recognize
from archon.data.mapping import (
    COLUMN,
    assistant_message,
    conversation,
    drop_long_rows,
    log_format,
    log_notes,
    reject_unsupported_columns,
)
from archon.data.pairs import pair_dataset
from archon.data.rows import RowDataset
from archon.data.sources import SourceRow
from archon.data.token_rows import encode_rows, row_lengths
from archon.schema.errors import DatasetError

LABEL = "label"
"""Column that is true for a desirable answer and false for an undesirable one."""


def labeled_dataset(
    source: Sequence[SourceRow],
    name: str,
    *,
    tokenizer: Any,
    prompt_key: str | None,
    response_key: str | None,
    system_prompt: str | None = None,
    instruction: str | None = None,
    max_length: int | None = None,
    turns: TurnOptions | None = None,
    bad_rows: Policy = "refuse",
) -> RowDataset:
    """Return rows `{"input_ids", "loss_mask", "label"}`; the mask is 1 on the tokens of the last answer.

    Rows with the columns `chosen` and `rejected` become a desirable and an undesirable row each. Other rows are those
    of SFT, with the column `label`.

    Raises:
        DatasetError: a row is malformed or its label is not true or false; names the line.
    """
    options: dict[str, Any] = {"tokenizer": tokenizer, "system_prompt": system_prompt, "instruction": instruction}
    if {"chosen", "rejected"} <= source[0].data.keys():
        key = None if response_key is None else prompt_key
        pairs = pair_dataset(
            source, name, prompt_key=key, max_length=max_length, turns=turns, bad_rows=bad_rows, **options
        )
        return replace(pairs, rows=[answer for pair in pairs for answer in _split(pair)])
    bad = BadRows(bad_rows)
    row_format = recognize(source, "sft", prompt_key, response_key, bad_rows)
    log_format(name, source, row_format)
    turns = replace(turns or TurnOptions(), train_turns="last")
    rows = encode_rows(source, partial(_labeled_rows, row_format=row_format, turns=turns, **options), name, bad)
    bad.report(name, rows)
    log_notes(name, len(source), bad.notes, tokenizer)
    dataset = RowDataset(name, rows, n_skipped=len(bad.errors))
    if max_length is None:
        return dataset
    return drop_long_rows(dataset, row_lengths(rows, ["input_ids"]), max_length)


def _split(pair: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"input_ids": pair[f"{side}_ids"], "loss_mask": pair[f"{side}_loss_mask"], LABEL: side == "chosen"}
        for side in ("chosen", "rejected")
    ]


def _labeled_rows(
    source: Sequence[SourceRow],
    notes: Notes,
    *,
    row_format: RowFormat,
    tokenizer: Any,
    system_prompt: str | None,
    instruction: str | None,
    turns: TurnOptions,
) -> list[dict[str, Any]]:
    examples, labels = [], []
    for source_row in source:
        label = source_row.data.get(LABEL)
        if not isinstance(label, bool):
            raise DatasetError(
                f"{source_row.where}: {LABEL!r} is {label!r:.80}, expected true for a desirable answer or false; or "
                "use rows with the columns chosen and rejected"
            )
        notes.update((COLUMN, column) for column in row_format.unused(source_row) - {LABEL})
        row = row_format.convert(source_row)
        reject_unsupported_columns(row)
        assert row_format.prompt_key is not None
        messages = conversation(row, row_format.prompt_key, system_prompt, instruction)
        if row_format.response_key is not None:
            messages = [*messages, assistant_message(row, row_format.response_key)]
        if messages[-1]["role"] != "assistant":
            raise DatasetError(
                f"{row.where}: the last turn has the role {messages[-1]['role']!r:.80}; expected 'assistant'"
            )
        examples.append(sft_text(tokenizer, messages, row.where, row.data.get("tools"), turns))
        labels.append(label)
    encoded = encode_sft(tokenizer, examples)
    return [
        {"input_ids": one["input_ids"], "loss_mask": one["loss_mask"], LABEL: label}
        for one, label in zip(encoded, labels, strict=True)
    ]
