"""Tokenization of prompts for generation, and of training examples with a loss mask.

One rule in SFT, preference pairs, RL and generation: a text is split where the model starts an answer and where it ends
one. If a token would span such a place, the parts are tokenized separately, as they are in generation.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby, pairwise
from typing import Any, Literal, NamedTuple

from archon.checkpoint.chat_template import (
    PROBE_TEXT,
    THINKING_FIELDS,
    ChatTemplate,
    Message,
    Rendering,
    Span,
    chat_template,
    has_chat_template,
    prompt_separator,
    render,
    render_calls,
    stop_token_ids,
    stop_tokens,
)
from archon.schema.errors import DatasetError, TokenizerError

__all__ = ["SFTText", "TurnOptions", "encode_prompt", "encode_sft", "next_turn_ids", "render", "sft_text", "tokenize"]

_BATCH = 2**17  # characters per call of the tokenizer, which encodes texts in parallel; more are slower (memory caches)


class SFTText(NamedTuple):
    """A rendered training example.

    Attributes:
        where: location in the source, for errors.
        text: full example.
        spans: trained text, as half-open ranges of characters.
        plain: rendered without a chat template: the tokenizer's beginning-of-text token is prepended, and the
            end-of-text token, which is trained, is appended.
    """

    where: str
    text: str
    spans: tuple[Span, ...]
    plain: bool


@dataclass(frozen=True)
class TurnOptions:
    """Which tokens of a conversation are trained.

    Attributes:
        train_turns: all assistant turns, or the last one.
        stripped_thinking: "mask" or "train" assistant turns without their thinking. Most templates remove the
            thinking of earlier turns.
        ignore_fields: fields of messages that may be lost because the template does not render them.
        long_rows: "drop" a conversation with too many tokens, or "truncate" it after its last trained turn that fits.
    """

    train_turns: Literal["all", "last"] = "all"
    stripped_thinking: Literal["mask", "train"] = "mask"
    ignore_fields: list[str] = field(default_factory=list)
    long_rows: Literal["drop", "truncate"] = "drop"


def plain_prompt(messages: Sequence[Message]) -> str:
    """Return a conversation as plain text, one line per message: for tokenizers without a chat template."""
    return "\n".join(message["content"] for message in messages)


def encode_prompt(tokenizer: Any, row: Mapping[str, Any], where: str | None = None, **options: Any) -> list[int]:
    """Return the token ids of an RL row's prompt, encoded as in SFT: by the chat template, else as plain text.

    `options` (`enable_thinking`) are passed to the chat template; the row's `tools` too. Errors name `where`, which
    defaults to the location of a row that `get_custom_dataset` has read.

    Raises:
        DatasetError: the row has neither `messages` nor `prompt`, or the chat template ignores its tools.
    """
    if where is None:
        where = str(getattr(row, "where", "this row"))
    if has_chat_template(tokenizer) and "messages" in row:
        tools = parse_tools(row.get("tools"), where)
        messages = [prepare_message(message, where) for message in row["messages"]]
        if not isinstance(tokenizer.chat_template, str | dict):  # not a tokenizer of transformers
            text = render_calls(tokenizer, messages, where, add_generation_prompt=True, tools=tools, **options)
            return list(tokenize(tokenizer, text, where)["input_ids"])
        chat = chat_template(tokenizer, **options)
        if tools:
            _require_tool_template(chat, where)
        rendering = chat.render(messages, where, tools, add_generation_prompt=True)
        for index, message in enumerate(messages):
            _check_fields(chat, rendering, index, message, where)
        text = rendering.text
        return list(tokenize(tokenizer, text, where)["input_ids"])
    if "prompt" not in row and "messages" not in row:
        raise DatasetError(f"the RL row has the keys {sorted(row)}; expected `messages` or `prompt` among them")
    text = row["prompt"] if "prompt" in row else plain_prompt(row["messages"])
    return _leading_ids(tokenizer) + list(tokenize(tokenizer, text + prompt_separator(tokenizer), where)["input_ids"])


def next_turn_ids(tokenizer: Any, message: Message, answer: Sequence[int]) -> list[int]:
    """Return the tokens between the model's `answer` and its next one, with `message` in between.

    They consist of the end of the model's turn, unless `answer` ends with a stop token, the message, and the generation
    prompt of the next turn. Tokens of earlier turns stay unchanged.
    """
    stopped = bool(answer) and answer[-1] in stop_token_ids(tokenizer)
    if not has_chat_template(tokenizer):
        text = "\n" + plain_prompt([message]) + prompt_separator(tokenizer)
        return list(tokenize(tokenizer, text, "the next turn")["input_ids"])
    chat = chat_template(tokenizer)
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE_TEXT}, message]
    rendering = chat.render(turns, "the next turn", add_generation_prompt=True)
    closing = rendering.text_of(1).rpartition(PROBE_TEXT)[2]
    following = rendering.text[rendering.segments[1][1] :]
    if message["content"].strip() not in following:
        raise DatasetError(f"the next turn: the chat template renders no message of the role {message['role']!r}")
    if stopped and (token := chat.special_suffix(closing)):
        closing = closing.partition(token)[2]
    ids = list(tokenize(tokenizer, closing + following, "the next turn")["input_ids"])
    # A turn without an end token ends with the token that starts the next message.
    return ids[1:] if stopped and ids[:1] == [answer[-1]] else ids


def tokenize(tokenizer: Any, text: str, where: str, **options: Any) -> Any:
    """Return the tokenizer's encoding of one text, without added special tokens.

    Raises DatasetError, naming `where`, for a text that cannot be tokenized: a character outside a vocabulary without
    an unknown token, or half of a surrogate pair.
    """
    try:
        return tokenizer(text, add_special_tokens=False, **options)
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise DatasetError(f"{where}: the tokenizer refuses {text[:80]!a}: {' '.join(str(error).split())}") from error


def sft_text(
    tokenizer: Any,
    messages: Sequence[Message],
    where: str,
    tools: Sequence[Any] | str | None = None,
    options: TurnOptions | None = None,
) -> SFTText:
    """Render an example: by the tokenizer's chat template if it has one, else as plain text.

    Assistant turns are trained, with their end token; plain text has one assistant turn, the last message. A message
    with `weight: 0` or `train: false` is not trained.

    Args:
        messages: conversation, with `role` and `content`.
        tokenizer: tokenizer of the model.
        where: location in the source, for errors.
        tools: functions for the chat template, in OpenAI's format.
        options: which turns are trained.

    Raises:
        DatasetError: the tokenizer's format cannot represent the tools or the conversation; names `where`.
    """
    options = options or TurnOptions()
    tools = parse_tools(tools, where)
    trained = [_is_trained(message, where) for message in messages]
    messages = [prepare_message(message, where) for message in messages]
    if has_chat_template(tokenizer):
        return _chat_text(tokenizer, messages, trained, where, tools, options)
    if tools:
        raise DatasetError(f"{where}: it has tools, but the tokenizer has no chat template for them")
    if len(messages) < 2 or any((message["role"] == "assistant") != (message is messages[-1]) for message in messages):
        raise DatasetError(
            f"{where}: expected one assistant message, the last, since the tokenizer has no chat template"
        )
    for message in messages:
        if field_name := next((name for name in ("tool_calls", *THINKING_FIELDS) if message.get(name)), None):
            raise DatasetError(f"{where}: it has {field_name}, but the tokenizer has no chat template that renders it")
    before = plain_prompt(messages[:-1]) + prompt_separator(tokenizer)
    text = before + messages[-1]["content"]
    return SFTText(where, text, ((len(before), len(text)),) if trained[-1] else (), plain=True)


def _chat_text(
    tokenizer: Any,
    messages: Sequence[Message],
    trained: Sequence[bool],
    where: str,
    tools: list[Any] | None,
    options: TurnOptions,
) -> SFTText:
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise DatasetError(f"{where}: nothing to train on: the conversation has no assistant turn")
    trained = [is_trained and index > 0 for index, is_trained in enumerate(trained)]  # the first turn has no prompt
    chat = chat_template(tokenizer)
    rendering = chat.render(messages, where, tools)
    if tools and "tools" not in options.ignore_fields:
        _require_tool_template(chat, where)
    if rendering.hidden_marks:
        raise DatasetError(f"{where}: the chat template has {{% generation %}} marks in a macro; move them out of it")
    stops = list(stop_tokens(tokenizer).values())
    text, spans = rendering.text, list[Span]()
    for index, message in enumerate(messages):
        complete = _check_fields(chat, rendering, index, message, where, options.ignore_fields)
        if message["role"] != "assistant" or not trained[index]:
            continue
        if options.train_turns == "last" and index != turns[-1]:
            continue
        if not (complete or options.stripped_thinking == "train"):
            continue
        start, end = rendering.segments[index]
        if rendering.generated is not None:
            marked = [(max(a, start), min(b, end)) for a, b in rendering.generated if a < end and b > start]
            if not marked:
                continue
            *earlier, (start, end) = marked
            spans += earlier
        else:
            start += chat.header_length(chat.header(messages[:index], where, tools), text[start:end])
        turn_end, appended = _turn_end(chat, text, start, end, message, stops)
        if turn_end < 0 and rendering.generated is None:
            raise DatasetError(
                f"{where}: the chat template ends the assistant turn {index} with {text[start:end].rstrip()[-20:]!r}, "
                f"and not with a token at which generation stops ({', '.join(stops)}), so a trained model would never "
                "stop; end the turn with {{ eos_token }} in the template"
            )
        text += appended
        spans.append((start, end if turn_end < 0 else turn_end))
    if not spans:
        raise DatasetError(f"{where}: nothing to train on: every assistant turn is masked, or has no prompt")
    return SFTText(where, text, tuple(spans), plain=False)


def _turn_end(
    chat: ChatTemplate, text: str, start: int, end: int, message: Message, stops: Sequence[str]
) -> tuple[int, str]:
    """Return where the trained text of a turn ends, with its stop token, and the token to append to the conversation.

    The end is -1 if the template writes no token that ends the turn.
    """
    pattern = "|".join(map(re.escape, stops))
    turn, rest = text[start:end].rstrip(), text[end:]
    if closing := re.search(rf"({pattern})(?:\s|{pattern})*$", turn):
        return start + closing.start() + len(closing[1]), ""
    if stop := next((token for token in stops if rest.startswith(token)), None):
        return end + len(stop), ""
    if not rest and (stop := chat.end_of_calls if message.get("tool_calls") else chat.end_of_answer):
        return end + len(stop), stop
    if token := chat.special_suffix(turn):
        # gpt-oss ends an earlier answer with <|end|>, at which generation does not stop.
        return start + len(turn) - len(token), ""
    return -1, ""


def _require_tool_template(chat: ChatTemplate, where: str) -> None:
    if not chat.renders_tools:
        raise DatasetError(f"{where}: it has tools, but the tokenizer's chat template ignores them")


def _check_fields(
    chat: ChatTemplate,
    rendering: Rendering,
    index: int,
    message: Message,
    where: str,
    ignore_fields: Sequence[str] = (),
) -> bool:
    """Check that the template renders every field of a message; return whether it renders the turn's thinking.

    Raises:
        DatasetError: a field is lost; names it.
    """
    turn, content = rendering.text_of(index), message["content"]
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    answer = content.rpartition("</think>")[2].strip()
    lost = None
    calls = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    if calls and not (chat.renders_calls and all(turn.count(name) >= calls.count(name) for name in calls)):
        lost = "tool_calls"
    elif message.get("name") and message["role"] != "tool" and str(message["name"]) not in rendering.text:
        lost = "name"
    elif message["role"] == "assistant":
        lost = None if answer in turn else "content"
    elif not turn and content.strip() not in rendering.outside(message["role"]):
        lost = "content"
    thinking = next((message[name] for name in THINKING_FIELDS if message.get(name)), None)
    thinking_field = "reasoning_content"
    if thinking is None and message["role"] == "assistant" and "</think>" in content:
        thinking, thinking_field = content.partition("</think>")[0].rpartition("<think>")[2], "content"
    before = turn.rpartition(answer)[0] if answer else turn
    complete = thinking is None or thinking.strip() in before
    if not complete and lost is None:
        probes = {"content": {"content": f"<think>\n{PROBE_TEXT}\n</think>\n\nanswer"}}
        fields = probes.get(thinking_field, dict.fromkeys(THINKING_FIELDS, PROBE_TEXT))
        if chat.renders(**fields):
            return False
        lost = "reasoning_content" if thinking_field != "content" else "thinking"
    if lost is not None and lost not in ignore_fields:
        raise DatasetError(
            f"{where}: the chat template does not render {lost!r} of message {index} ({message['role']}), so it would "
            f"be lost; use a template that renders it, or set ignore_fields=[{lost}]"
        )
    return True


def _is_trained(message: Message, where: str) -> bool:
    """Return whether `weight` and `train` of a message allow it to be trained."""
    for name in ("weight", "train"):
        if message.get(name) not in (None, 0, 1):
            raise DatasetError(f"{where}: {name!r} of a message is {message[name]!r:.80}; expected 0 or 1")
    return all(message.get(name) in (None, 1) for name in ("weight", "train"))


def prepare_message(message: Message, where: str) -> Message:
    """Return a message as chat templates expect it: arguments of tool calls as objects, and no field for training."""
    if message.keys() == {"role", "content"} and type(message["content"]) is str:  # fast path of most messages
        return {**message}
    prepared = {name: value for name, value in message.items() if name not in ("weight", "train") and value is not None}
    prepared.setdefault("content", "")
    expected: dict[str, Any] = dict.fromkeys([*THINKING_FIELDS, "name"], str) | {"tool_calls": list}
    if not isinstance(prepared["content"], list):
        expected["content"] = str
    for name, kind in expected.items():
        if not isinstance(prepared.get(name, kind()), kind):
            raise DatasetError(f"{where}: {name!r} of a message is {prepared[name]!s:.80}; expected a {kind.__name__}")
    if calls := prepared.get("tool_calls"):
        prepared["tool_calls"] = [_prepare_call(call, where) for call in calls]
    if prepared.get("function_call"):
        raise DatasetError(f"{where}: a message has 'function_call', which tool_calls replaced; rename it in the data")
    return prepared


def _prepare_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DatasetError(
            f"{where}: a tool call is {call!r:.120}; expected {{'function': {{'name': …, 'arguments': …}}}}"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{where}: the arguments of {function['name']!r:.80} are not JSON: {error}") from None
    if not isinstance(arguments, dict | None):
        raise DatasetError(f"{where}: the arguments of {function['name']!r:.80} are not a JSON object")
    return {
        "type": "function",
        **(call if "function" in call else {}),
        "function": {**function, "arguments": arguments or {}},
    }


def parse_tools(tools: Any, where: str) -> list[dict[str, Any]] | None:
    """Return the functions of a conversation: a list in OpenAI's format, or such a list as JSON.

    Raises:
        DatasetError: something else; names `where`.
    """
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "[]")
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{where}: 'tools' is no JSON: {error}") from None
    if not tools:
        return None
    if not (isinstance(tools, list) and all(isinstance(tool, dict) and _tool_name(tool) for tool in tools)):
        raise DatasetError(f"{where}: 'tools' must be a list of objects {{'type': 'function', 'function': …}}")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _tool_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function", tool)
    return str(function.get("name") or "") if isinstance(function, dict) else ""


def tokenizer_identity(tokenizer: Any) -> list[Any]:
    """Return everything of a tokenizer that changes encoded rows, JSON-compatible."""
    vocabulary = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
    return [vocabulary, tokenizer.special_tokens_map, prompt_separator(tokenizer), stop_token_ids(tokenizer)]


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
    split = _splits_freely(tokenizer)
    totals = accumulate(len(example.text) for example in examples)
    for _, group in groupby(zip(totals, examples, strict=True), lambda pair: pair[0] // _BATCH):
        batch = [example for _, example in group]
        if split:
            rows += _encode_pieces(tokenizer, batch)
            continue
        try:
            encoded = tokenizer([e.text for e in batch], add_special_tokens=False, return_offsets_mapping=True)
        except Exception:  # retried one by one, so that the error names the example
            for example in batch:
                tokenize(tokenizer, example.text, example.where)
            raise
        for example, ids, offsets in zip(batch, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            borders = {border for span in example.spans for border in span}
            if any(begin < border < end for begin, end in offsets for border in borders):
                rows += _encode_pieces(tokenizer, [example])
            else:
                rows.append(_sft_row(tokenizer, example, ids, _mask(example.spans, offsets)))
    return rows


def _splits_freely(tokenizer: Any) -> bool:
    """Return whether a part of a text has the same tokens alone; SentencePiece adds a space to the start of a text."""
    words = ["x", "Paris", "1"]
    try:
        alone = tokenizer(words, add_special_tokens=False)["input_ids"]
        after = tokenizer([f"\n{word}" for word in words], add_special_tokens=False)["input_ids"]
    except Exception:  # noqa: BLE001 - a vocabulary without these characters
        return False
    return any(whole[-len(part) :] == part for whole, part in zip(after, alone, strict=True))


def _encode_pieces(tokenizer: Any, examples: Sequence[SFTText]) -> list[dict[str, list[int]]]:
    """Tokenize each text in pieces, split at the borders of trained spans. This is faster than token offsets."""
    texts, owners = [], []
    for number, example in enumerate(examples):
        borders = [0, *chain.from_iterable(example.spans), len(example.text)]
        for index, (start, end) in enumerate(pairwise(borders)):
            if start < end:
                texts.append(example.text[start:end])
                owners.append((number, index % 2))
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    try:
        pieces = backend.encode_batch_fast(texts, add_special_tokens=False)
    except Exception:
        for (number, _), text in zip(owners, texts, strict=True):
            tokenize(tokenizer, text, examples[number].where)
        raise
    ids: list[list[int]] = [[] for _ in examples]
    masks: list[list[int]] = [[] for _ in examples]
    for (number, trained), piece in zip(owners, pieces, strict=True):
        tokens = piece.ids
        ids[number] += tokens
        masks[number] += [trained] * len(tokens)
    return [_sft_row(tokenizer, *row) for row in zip(examples, ids, masks, strict=True)]


def _sft_row(tokenizer: Any, example: SFTText, ids: list[int], mask: list[int]) -> dict[str, list[int]]:
    if not any(mask):
        raise DatasetError(f"{example.where}: nothing to train on: the response is empty")
    if example.plain:
        leading = _leading_ids(tokenizer)
        ids = [*leading, *ids, tokenizer.eos_token_id]
        mask = [*[0] * len(leading), *mask, 1]
    return {"input_ids": ids, "loss_mask": mask}


def _mask(spans: Sequence[Span], offsets: Sequence[Span]) -> list[int]:
    """Return 1 for every token that starts in a span; spans and offsets are in the order of the text."""
    mask, number = [], 0
    for begin, _ in offsets:
        while number < len(spans) and spans[number][1] <= begin:
            number += 1
        mask.append(int(number < len(spans) and spans[number][0] <= begin))
    return mask


def _leading_ids(tokenizer: Any) -> list[int]:
    """Return the beginning-of-text token if the tokenizer prepends one to plain text, else an empty list."""
    start = list(tokenizer("")["input_ids"][:1])
    return start if start and start[0] == tokenizer.bos_token_id else []
