"""Tokenization of prompts for generation, and of SFT examples with a loss mask from token offsets.

A conversation is rendered once as text, the spans of assistant turns are located in it, and the text is tokenized once.
A token is trained if it starts inside a span. Parts of the text are never tokenized separately, because that can change
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from archon.schema.errors import DatasetError, TokenizerError

Message = dict[str, Any]  # {"role": "user", "content": "…"}
_BATCH = 1000  # texts per call of the tokenizer, which encodes them in parallel


class SFTText(NamedTuple):
    """A rendered SFT example.

    Attributes:
        where: location in the source, for errors.
        text: full example.
        spans: trained text, as half-open ranges of characters.
        plain: rendered without a chat template: the tokenizer's beginning-of-text token is prepended, and the
            end-of-text token, which is trained, is appended.
    """

    where: str
    text: str
    spans: tuple[tuple[int, int], ...]
    plain: bool


def has_chat_template(tokenizer: Any) -> bool:
    """Return whether the tokenizer has a chat template; without one conversations are rendered as plain text."""
    return bool(getattr(tokenizer, "chat_template", None))


def plain_prompt(messages: Sequence[Message], end: str = "\n") -> str:
    """Return a conversation as plain text, one line per message, then `end`: for tokenizers without a template."""
    return "\n".join(message["content"] for message in messages) + end


def encode_prompt(tokenizer: Any, row: dict[str, Any], **options: Any) -> list[int]:
    """Return the token ids of an RL row's prompt, encoded as in SFT: by the chat template, else as plain text.

    `options` (`enable_thinking`) are passed to the chat template.

    Raises:
        DatasetError: the row has neither `messages` nor `prompt`.
    """
    if has_chat_template(tokenizer) and "messages" in row:
        text = render(tokenizer, row["messages"], "this row", add_generation_prompt=True, **options)
        return list(tokenize(tokenizer, text, "this row")["input_ids"])
    if "prompt" not in row and "messages" not in row:
        raise DatasetError(f"the RL row has the keys {sorted(row)}; expected `messages` or `prompt` among them")
    text = row["prompt"] if "prompt" in row else plain_prompt(row["messages"])
    return _leading_ids(tokenizer) + list(tokenize(tokenizer, text, "this row")["input_ids"])


def next_turn_ids(tokenizer: Any, message: Message, answer: Sequence[int]) -> list[int]:
    """Return the tokens between the model's `answer` and its next one, with `message` in between.

    They consist of the end of the model's turn, unless `answer` ends with it, the message, and the generation prompt of
    the next turn. Tokens of earlier turns stay unchanged; only the new tokens come from a rendered conversation.
    """
    if not has_chat_template(tokenizer):
        text = plain_prompt([{"content": "\n" + message["content"]}])
    else:
        placeholder = "(the model's answer)"
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": placeholder}, message]
        text = render(tokenizer, turns, "the next turn", add_generation_prompt=True).rpartition(placeholder)[2]
    ids = list(tokenize(tokenizer, text, "the next turn")["input_ids"])
    return ids[1:] if answer and ids[:1] == [answer[-1]] == [tokenizer.eos_token_id] else ids


def tokenize(tokenizer: Any, text: str, where: str, **options: Any) -> Any:
    """Return the tokenizer's encoding of one text, without added special tokens.

    Raises DatasetError, naming `where`, for a text that cannot be tokenized: a character outside a vocabulary without
    an unknown token, or half of a surrogate pair.
    """
    try:
        return tokenizer(text, add_special_tokens=False, **options)
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise DatasetError(f"{where}: the tokenizer refuses {text[:80]!a}: {' '.join(str(error).split())}") from error


def render(
    tokenizer: Any, messages: Sequence[Message], where: str, add_generation_prompt: bool = False, **options: Any
) -> str:
    """Return the chat template's text of a conversation; `options` (tools) are passed to the template.

    Raises DatasetError, naming `where`, if the template fails.
    """
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **options
        )
    except Exception as error:  # a template is a program: it divides by zero, or calls itself without end
        roles = [message.get("role") for message in messages]
        reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise DatasetError(f"{where}: the chat template refuses this conversation (roles {roles}): {reason}") from error
    return str(text)


def sft_text(
    tokenizer: Any, messages: Sequence[Message], where: str, plain_end: str = "\n", tools: Sequence[Any] | None = None
) -> SFTText:
    """Render an example: by the tokenizer's chat template if it has one, else as plain text.

    Every assistant turn is trained, with its end token; plain text has one assistant turn, the last message.

    Args:
        messages: conversation, with `role` and `content`.
        tokenizer: tokenizer of the model.
        where: location in the source, for errors.
        plain_end: text between prompt and response in plain text.
        tools: functions for the chat template, in OpenAI's format.

    Raises:
        DatasetError: the tokenizer's format cannot represent the tools or the conversation; names `where`.
    """
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DatasetError(f"{where}: 'tools' must be a list of objects {{'type': 'function', 'function': …}}")
    if has_chat_template(tokenizer):
        return _chat_text(tokenizer, messages, where, {"tools": tools} if tools else {})
    if tools:
        raise DatasetError(f"{where}: it has tools, but the tokenizer has no chat template for them")
    if len(messages) < 2 or any((message["role"] == "assistant") != (message is messages[-1]) for message in messages):
        raise DatasetError(
            f"{where}: expected one assistant message, the last, since the tokenizer has no chat template"
        )
    before = plain_prompt(messages[:-1], plain_end)
    text = before + messages[-1]["content"]
    return SFTText(where, text, ((len(before), len(text)),), plain=True)


def _chat_text(tokenizer: Any, messages: Sequence[Message], where: str, options: dict[str, Any]) -> SFTText:
    text = render(tokenizer, messages, where, **options)
    if options and text == render(tokenizer, messages, where):
        raise DatasetError(f"{where}: it has tools, but the tokenizer's chat template ignores them")
    turns = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns:
        raise DatasetError(f"{where}: nothing to train on: the conversation has no assistant turn")
    if turns[0] == 0:
        raise DatasetError(f"{where}: the conversation starts with an assistant turn; expected a user turn before it")
    spans = tuple(_assistant_span(tokenizer, messages, index, text, where, options) for index in turns)
    return SFTText(where, text, spans, plain=False)


def _assistant_span(
    tokenizer: Any, messages: Sequence[Message], index: int, text: str, where: str, options: dict[str, Any]
) -> tuple[int, int]:
    """Return the span of turn `index` in `text`, from the end of its generation prompt to the end of its end token.

    Templates may render an earlier turn differently from the last one (Qwen3 drops its thinking). Then the turn is
    located by its content, and its end by the text that follows the content when the turn is rendered last. A turn
    that only calls tools has no content, and is located by the text that follows its thinking there.
    """
    before = render(tokenizer, messages[:index], where, add_generation_prompt=True, **options)
    if not text.startswith(before):
        raise DatasetError(
            f"{where}: the chat template renders the messages before turn {index} differently when others follow; "
            "the turn's loss mask cannot be determined"
        )
    start = len(before)
    until_here = render(tokenizer, messages[: index + 1], where, **options)
    if text.startswith(until_here):
        return start, len(until_here.rstrip())
    content = str(messages[index]["content"]).rpartition("</think>")[2].strip()
    turn = (content + until_here.rpartition(content or "</think>")[2]).strip()
    position = text.find(turn, start)
    if position < 0:
        raise DatasetError(f"{where}: cannot find the text of turn {index} in the rendered conversation")
    return start, position + len(turn)


def encode_sft(tokenizer: Any, examples: Sequence[SFTText]) -> list[dict[str, list[int]]]:
    """Return rows `{"input_ids", "loss_mask"}` of rendered examples, lists of int of equal length.

    Raises:
        TokenizerError: the tokenizer has no offsets, or it has no end-of-text token although plain text needs one.
        DatasetError: an example without a trained token, or which cannot be tokenized.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise TokenizerError("SFT needs a fast tokenizer (tokenizer.json), because token offsets define the loss mask")
    if any(example.plain for example in examples) and tokenizer.eos_token_id is None:
        raise TokenizerError("the tokenizer has neither a chat template nor an end-of-text token; set one of them")
    rows = []
    for first in range(0, len(examples), _BATCH):
        batch = examples[first : first + _BATCH]
        try:
            encoded = tokenizer([e.text for e in batch], add_special_tokens=False, return_offsets_mapping=True)
        except Exception:  # retried one by one, so that the error names the example
            for example in batch:
                tokenize(tokenizer, example.text, example.where)
            raise
        for example, ids, offsets in zip(batch, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            rows.append(_sft_row(tokenizer, example, ids, offsets))
    return rows


def _sft_row(tokenizer: Any, example: SFTText, ids: list[int], offsets: list[tuple[int, int]]) -> dict[str, list[int]]:
    mask = [int(any(start <= begin < end for start, end in example.spans)) for begin, _ in offsets]
    if not any(mask):
        raise DatasetError(f"{example.where}: nothing to train on: the response is empty")
    ids = list(ids)
    if example.plain:
        leading = _leading_ids(tokenizer)
        ids = [*leading, *ids, tokenizer.eos_token_id]
        mask = [*[0] * len(leading), *mask, 1]
    return {"input_ids": ids, "loss_mask": mask}


def _leading_ids(tokenizer: Any) -> list[int]:
    """Return the beginning-of-text token if the tokenizer prepends one to plain text, else an empty list."""
    start = list(tokenizer("")["input_ids"][:1])
    return start if start and start[0] == tokenizer.bos_token_id else []
