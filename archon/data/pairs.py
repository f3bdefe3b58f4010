"""Preference pairs for DPO and reward models: a chosen and a rejected answer to one prompt."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from archon.checkpoint.chat_template import Message, has_chat_template
from archon.data.bad_rows import BadRows, Notes, Policy
from archon.data.encoding import TurnOptions, encode_sft, sft_text
from archon.data.formats import RESPONSE_KEY, RowFormat, recognize
from archon.data.mapping import (
    COLUMN,
    THINKING,
    assistant_message,
    conversation,
    drop_long_rows,
    has_thinking,
    log_format,
    log_notes,
    reject_unsupported_columns,
    require_column,
)
from archon.data.named_datasets import require_tokenizer
from archon.data.rows import RowDataset
from archon.data.sources import SourceRow, open_rows
from archon.data.token_rows import encode_rows, row_lengths
from archon.schema.errors import DatasetError

logger = logging.getLogger(__name__)

_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_ASSISTANT = "\n\nAssistant:"
ENCODED_PAIR = (("chosen_ids", "chosen_loss_mask"), ("rejected_ids", "rejected_loss_mask"))
"""Columns of token ids and loss masks of pairs that a loader has encoded."""
MARGIN = "margin"
"""Column with the margin of a pair, for reward models."""
_IDENTICAL = "identical"  # kind of a note
_ROLES = {"Human": "user", "Assistant": "assistant"}


def pair_dataset(
    source: Sequence[SourceRow],
    name: str,
    *,
    tokenizer: Any,
    prompt_key: str | None,
    chosen_key: str = "chosen",
    rejected_key: str = "rejected",
    system_prompt: str | None = None,
    instruction: str | None = None,
    max_length: int | None = None,
    turns: TurnOptions | None = None,
    margins: bool = False,
    bad_rows: Policy = "refuse",
) -> RowDataset:
    r"""Return rows `{"chosen_ids", "chosen_loss_mask", "rejected_ids", "rejected_loss_mask"}`, lists of int.

    A mask is 1 on the tokens of the last answer, the only turn in which the two differ.

    Args:
        source: rows.
        tokenizer: tokenizer of the model.
        name: name of the dataset, for messages.
        prompt_key: column with the prompt: a string, or a list of messages. None: the other two columns hold full
            conversations, as lists of messages or as text with turns that start with `\n\nHuman: ` and
            `\n\nAssistant: `.
        chosen_key: column of the preferred answer.
        rejected_key: column of the other answer.
        system_prompt: as in `rl_dataset`.
        instruction: as in `rl_dataset`.
        max_length: drop pairs in which either example has more tokens.
        turns: options of the chat template; the last turn alone is trained.
        margins: read the column `margin`, a number for the loss of reward models, if the first row has it.
        bad_rows: "skip" leaves out pairs that cannot be used.

    Raises:
        DatasetError: a column is missing or empty, or a conversation does not end with an answer; names the line.
    """
    bad = BadRows(bad_rows)
    row_format = recognize(source, "dpo", prompt_key, RESPONSE_KEY, bad_rows)
    log_format(name, source, row_format)
    encode = partial(
        _pair_rows,
        row_format=row_format,
        tokenizer=tokenizer,
        answer_keys=(chosen_key, rejected_key),
        system_prompt=system_prompt,
        instruction=instruction,
        turns=replace(turns or TurnOptions(), train_turns="last"),
        margin_key=MARGIN if margins and MARGIN in source[0].data else None,
    )
    rows = encode_rows(source, encode, name, bad)
    bad.report(name, rows)
    if identical := bad.notes[_IDENTICAL, ""]:
        logger.warning("%s: %d of %d pairs have two identical answers and train nothing", name, identical, len(source))
    log_notes(name, len(source), bad.notes, tokenizer)
    dataset = RowDataset(name, rows, n_skipped=len(bad.errors))
    if max_length is None:
        return dataset
    return drop_long_rows(dataset, row_lengths(rows, ["chosen_ids", "rejected_ids"]), max_length)


def _pair_rows(
    source: Sequence[SourceRow],
    notes: Notes,
    *,
    row_format: RowFormat,
    tokenizer: Any,
    answer_keys: tuple[str, str],
    system_prompt: str | None,
    instruction: str | None,
    turns: TurnOptions,
    margin_key: str | None,
) -> list[dict[str, Any]]:
    examples = []
    extra = [{} if margin_key is None else {MARGIN: _margin(row)} for row in source]
    plain = not has_chat_template(tokenizer)
    for source_row in source:
        notes.update((COLUMN, column) for column in row_format.unused(source_row) - {*answer_keys, margin_key})
        row = row_format.convert(source_row)
        reject_unsupported_columns(row)
        pair = [
            _conversation(row, row_format.prompt_key, key, system_prompt, instruction, plain) for key in answer_keys
        ]
        if pair[0][:-1] != pair[1][:-1]:
            raise DatasetError(
                f"{row.where}: {answer_keys[0]!r} and {answer_keys[1]!r} differ before their last turns; expected two "
                "answers to one conversation"
            )
        notes[_IDENTICAL, ""] += pair[0] == pair[1]
        notes[THINKING, ""] += has_thinking([*pair[0], pair[1][-1]])
        examples += [sft_text(tokenizer, messages, row.where, row.data.get("tools"), turns) for messages in pair]
    encoded = encode_sft(tokenizer, examples)
    return [
        {
            "chosen_ids": chosen["input_ids"],
            "chosen_loss_mask": chosen["loss_mask"],
            "rejected_ids": rejected["input_ids"],
            "rejected_loss_mask": rejected["loss_mask"],
            **margin,
        }
        for chosen, rejected, margin in zip(encoded[::2], encoded[1::2], extra, strict=True)
    ]


def _margin(row: SourceRow) -> float:
    value = row.data.get(MARGIN)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DatasetError(
            f"{row.where}: {MARGIN!r} is {value!r:.80}, expected a finite number, as the first row has one"
        )
    return float(value)


def _conversation(
    row: SourceRow, prompt_key: str | None, key: str, system_prompt: str | None, instruction: str | None, plain: bool
) -> list[Message]:
    if prompt_key is not None:
        return [*conversation(row, prompt_key, system_prompt, instruction), assistant_message(row, key)]
    if isinstance(require_column(row, key), str):
        turns = parse_transcript(row, key)
        if plain and turns[-1]["role"] == "assistant":
            # Without a chat template the markers separate the turns, so the text is kept.
            before, _, answer = row.data[key].rpartition(_ASSISTANT)
            row = SourceRow(row.where, row.data | {key: before})
            messages = conversation(row, key, system_prompt, instruction)
            messages[-1]["content"] += _ASSISTANT
            return [*messages, {"role": "assistant", "content": answer}]
        row = SourceRow(row.where, row.data | {key: turns})
    messages = conversation(row, key, system_prompt, instruction)
    if messages[-1]["role"] != "assistant":
        raise DatasetError(
            f"{row.where}: the last turn of {key!r} has the role {messages[-1]['role']!r:.80}; expected 'assistant'"
        )
    return messages


def parse_transcript(row: SourceRow, key: str) -> list[Message]:
    r"""Return the turns of a text in the format of hh_rlhf: `\n\nHuman: … \n\nAssistant: …`."""
    before, *turns = _TURN.split(row.data[key])
    if before.strip() or not turns:
        raise DatasetError(
            f"{row.where}: {key!r} must start with '\\n\\nHuman: ', got {row.data[key][:40]!r}; or put the question "
            "in a column prompt"
        )
    pairs = zip(turns[::2], turns[1::2], strict=True)
    return [{"role": _ROLES[speaker], "content": text.strip()} for speaker, text in pairs]


def get_hh_rlhf_rw_dataset(
    path: str | Path | None = None,
    split: str = "train",
    tokenizer: Any = None,
    max_length: int | None = None,
    **options: Any,
) -> RowDataset:
    """Return preference pairs of HH-RLHF (Bai et al. 2022, arXiv:2204.05862), from a directory or the hub (default).

    `options` are passed to `pair_dataset`: system_prompt, instruction.
    """
    source = open_rows(path or "Anthropic/hh-rlhf", split)
    options |= {"tokenizer": require_tokenizer(tokenizer, "hh_rlhf"), "max_length": max_length}
    return pair_dataset(source, f"hh_rlhf[{split}]", prompt_key=None, **options)


get_hh_rlhf_dpo_dataset = get_hh_rlhf_rw_dataset
