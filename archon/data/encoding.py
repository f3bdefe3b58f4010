"""From text to tokens: prompts for generation, and SFT rows whose loss mask comes from token offsets.

A conversation is rendered once, as text; the assistant's spans are found in that text; the text is tokenised once, and
a token is trained where it begins inside a span. Pieces are never encoded by themselves: their tokens can differ from
those of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from archon.schema.errors import DatasetError, TokenizerError

Message = dict[str, Any]  # {"role": "user", "content": "…"}
_BATCH = 1000  # texts given to the tokenizer at a time; it encodes them in parallel


class SFTText(NamedTuple):
    """A rendered example.

    Attributes:
        where: Its place in the source, for error messages.
        text: The whole example.
        spans: What is trained, as half-open ranges of characters.
        plain: No chat template: the tokenizer's leading token goes before it, the end-of-text token, trained, after it.
    """

    where: str
    text: str
    spans: tuple[tuple[int, int], ...]
    plain: bool


def has_chat_template(tokenizer: Any) -> bool:
    """Whether conversations are rendered by the tokenizer's own template, or as plain text."""
    return bool(getattr(tokenizer, "chat_template", None))


def plain_prompt(messages: Sequence[Message], end: str = "\n") -> str:
    """A conversation for a tokenizer without a chat template: the contents on lines of their own, then `end`."""
    return "\n".join(message["content"] for message in messages) + end


def encode_prompt(tokenizer: Any, row: dict[str, Any]) -> list[int]:
    """Token ids of an RL row's prompt, exactly as SFT saw them: by the chat template, or else the row's plain `prompt`.

    Raises:
        DatasetError: the row has neither what its tokenizer needs nor the other.
    """
    if has_chat_template(tokenizer) and "messages" in row:
        text = render(tokenizer, row["messages"], "this row", add_generation_prompt=True)
        return list(tokenize(tokenizer, text, "this row")["input_ids"])
    if "prompt" not in row and "messages" not in row:
        raise DatasetError(f"an RL row needs `messages` or `prompt`, got {sorted(row)}")
    text = row["prompt"] if "prompt" in row else plain_prompt(row["messages"])
    return _leading_ids(tokenizer) + list(tokenize(tokenizer, text, "this row")["input_ids"])


def next_turn_ids(tokenizer: Any, message: Message, answer: Sequence[int]) -> list[int]:
    """What follows the model's `answer` when `message` is said next: the end of its turn as far as it has not said that
    itself, the message, and the beginning of its next turn.

    The tokens so far stay as they are; the text between is taken from the rendering of a conversation.
    """
    if not has_chat_template(tokenizer):
        text = plain_prompt([{"content": "\n" + message["content"]}])
    else:
        said = "(what the model said)"
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}, message]
        text = render(tokenizer, talk, "the next turn", add_generation_prompt=True).rpartition(said)[2]
    ids = list(tokenize(tokenizer, text, "the next turn")["input_ids"])
    return ids[1:] if answer and ids[:1] == [answer[-1]] == [tokenizer.eos_token_id] else ids


def tokenize(tokenizer: Any, text: str, where: str, **options: Any) -> Any:
    """The tokenizer's encoding of one text, special tokens not added. A text that it refuses is a `DatasetError`
    naming `where`: a character outside a vocabulary without an unknown token, half of a surrogate pair."""
    try:
        return tokenizer(text, add_special_tokens=False, **options)
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise DatasetError(f"{where}: the tokenizer refuses {text[:80]!a}: {' '.join(str(error).split())}") from error


def render(
    tokenizer: Any, messages: Sequence[Message], where: str, add_generation_prompt: bool = False, **options: Any
) -> str:
    """The chat template's text of a conversation; `options` (tools) go to it. A template that refuses it is a
    `DatasetError` naming `where`."""
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
    """Renders an example: by the chat template where there is one, else as plain text.

    Every assistant turn is trained, with the token that ends it; plain text has one, the last message.

    Args:
        plain_end: What plain text has between the prompt and the response.
        tools: Functions for the chat template, each as OpenAI describes it.
    """
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DatasetError(f"{where}: 'tools' must be a list of objects {{'type': 'function', 'function': …}}")
    if has_chat_template(tokenizer):
        return _chat_text(tokenizer, messages, where, {"tools": tools} if tools else {})
    if tools:
        raise DatasetError(f"{where}: it has tools, and the tokenizer has no chat template to put them in")
    if len(messages) < 2 or any((message["role"] == "assistant") != (message is messages[-1]) for message in messages):
        raise DatasetError(f"{where}: a tokenizer without a chat template takes one response, as the last message")
    before = plain_prompt(messages[:-1], plain_end)
    text = before + messages[-1]["content"]
    return SFTText(where, text, ((len(before), len(text)),), plain=True)


def _chat_text(tokenizer: Any, messages: Sequence[Message], where: str, options: dict[str, Any]) -> SFTText:
    text = render(tokenizer, messages, where, **options)
    if options and text == render(tokenizer, messages, where):
        raise DatasetError(f"{where}: it has tools, and the chat template has no place for them")
    turns = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    if not turns:
        raise DatasetError(f"{where}: nothing to train on: the conversation has no assistant turn")
    if turns[0] == 0:
        raise DatasetError(f"{where}: the conversation begins with an assistant turn, which answers nothing")
    spans = tuple(_assistant_span(tokenizer, messages, index, text, where, options) for index in turns)
    return SFTText(where, text, spans, plain=False)


def _assistant_span(
    tokenizer: Any, messages: Sequence[Message], index: int, text: str, where: str, options: dict[str, Any]
) -> tuple[int, int]:
    """Where turn `index` stands in `text`: from the end of its generation prompt to the end of its closing token.

    Templates may render an earlier turn otherwise than the last one (Qwen3 drops its thinking); then the turn is found
    by its content, and its end by the closing text that follows the content where the turn stands last; one that
    only calls tools has no content, and is found by what follows its thinking there.
    """
    before = render(tokenizer, messages[:index], where, add_generation_prompt=True, **options)
    if not text.startswith(before):
        raise DatasetError(
            f"{where}: the chat template changes what stands before turn {index}; its loss mask is unknown"
        )
    start = len(before)
    until_here = render(tokenizer, messages[: index + 1], where, **options)
    if text.startswith(until_here):
        return start, len(until_here.rstrip())
    content = str(messages[index]["content"]).rpartition("</think>")[2].strip()
    turn = (content + until_here.rpartition(content or "</think>")[2]).strip()
    found = text.find(turn, start)
    if found < 0:
        raise DatasetError(f"{where}: cannot find turn {index} in what the chat template makes of the conversation")
    return start, found + len(turn)


def encode_sft(tokenizer: Any, examples: Sequence[SFTText]) -> list[dict[str, list[int]]]:
    """Tokenises rendered examples into rows `{"input_ids", "loss_mask"}`, each a list of int, of one length.

    Raises:
        TokenizerError: the tokenizer gives no offsets, or has no end-of-text token where one must be added.
        DatasetError: an example in which no token is trained, or which the tokenizer refuses.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise TokenizerError("SFT needs a fast tokenizer (tokenizer.json): its loss mask comes from token offsets")
    if any(example.plain for example in examples) and tokenizer.eos_token_id is None:
        raise TokenizerError("the tokenizer has neither a chat template nor an end-of-text token to end an answer with")
    rows = []
    for first in range(0, len(examples), _BATCH):
        batch = examples[first : first + _BATCH]
        try:
            encoded = tokenizer([e.text for e in batch], add_special_tokens=False, return_offsets_mapping=True)
        except Exception:  # again one by one, so that the error names the example
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
    """The beginning-of-text token, where this tokenizer puts one before plain text."""
    start = list(tokenizer("")["input_ids"][:1])
    return start if start and start[0] == tokenizer.bos_token_id else []
