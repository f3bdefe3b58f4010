"""Chat templates of released models: 200 random conversations each, against a brute-force reference.

The templates are read from the folder of real data.
"""

from __future__ import annotations

import os
import random
import re
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest

from archon.checkpoint.chat_template import add_thinking_aliases, render, render_calls, stop_tokens
from archon.data.encoding import (
    SFTText,
    TurnOptions,
    encode_prompt,
    encode_sft,
    next_turn_ids,
    prepare_message,
    sft_text,
)
from archon.schema.errors import DatasetError
from tests.conftest import find_data
from tests.data.toy_tokenizers import toy_tokenizer

pytestmark = pytest.mark.data

FOLDER = (find_data() or Path()) / "chat_templates"
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja")) or ["none"]
CONVERSATIONS = 200
MARK = "⟦mark⟧"
HEADER = "<|im_start|>assistant\n"
LAST = TurnOptions(train_turns="last")
WORDS = re.split(
    r"\s+",
    "<think> </think> <tool_call> </tool_call> <|channel|> <|message|> <|start|> <|end|> <|return|> <|call|> "
    "<|eot_id|> <|start_header_id|> <|end_header_id|> <start_of_turn> <end_of_turn> <|user|> <|assistant|> <|system|> "
    "<|observation|> <｜Assistant｜> <｜User｜> <｜end▁of▁sentence｜> <｜tool▁calls▁end｜> <|endoftext|>",
)
ANSWERS = ("12", "12", "yes", "no", "", "There are 12.", "<b>数学</b>", "assistant\nuser: x", "Größe 🍐", "ok\n\nfine")
SPECIAL = re.compile("|".join(map(re.escape, [*WORDS, "<|im_start|>", "<|im_end|>", "<s>"])))
FUNCTION = {"name": "w", "description": "d", "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
CALL = {"id": "abcdefghi", "type": "function"}

NO_TOOLS = "ignores them"
NO_THINKING = "does not render 'reasoning_content'"
NO_CALLS = "does not render 'tool_calls'"
NO_ROLE = "System role not supported|Conversation roles must alternate"
# Refusals of each template; other templates refuse nothing.
REFUSALS = {
    "gemma": {NO_TOOLS, NO_THINKING, NO_ROLE},
    "gemma3": {NO_TOOLS, NO_THINKING, NO_ROLE},
    "lfm2": {NO_CALLS, NO_THINKING},
}
for name in ("llama3_1", "llama3_2", "qwen2_5", "qwen3_instruct_2507", "qwen3_vl"):
    REFUSALS[name] = {NO_THINKING}
for name in ("deepseekv3", "deepseekv3_training", "llama3", "phi3", "phi3_5", "phi3_training", "qwen2_5_vl"):
    REFUSALS[name] = {NO_TOOLS, NO_THINKING}
# The template renders an earlier turn unlike a sampled one: without the thought that its prompt opens, or with an end
# at which generation does not stop. RL keeps the sampled tokens.
REWRITTEN = {
    *("deepseekv3", "deepseekv3_training", "gptoss", "gptoss_training", "nemotron_3_nano", "qwen3"),
    *("qwen3_5_nothink", "qwen3_5_think", "qwen3_6"),
}
# Earlier turns end with <|end|>, at which generation does not stop; only the last turn trains its end.
OTHER_END = {"gptoss": "<|end|>", "gptoss_training": "<|end|>"}
# The template's own {% generation %} marks include the header of a turn.
MARKED_HEADER = {"deepseekv3_training": "<｜Assistant｜>", "gptoss_training": "<|start|>assistant"}


def tokenizer_of(template: str) -> Any:
    tokenizer = toy_tokenizer(
        (FOLDER / f"{template}.jinja").read_text(encoding="utf-8"), eos="<|endoftext|>", bos="<s>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": WORDS})
    return tokenizer


def conversation(draw: random.Random, with_tools: bool, with_thinking: bool) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": "sys"}] if draw.random() < 0.3 else []
    for _ in range(draw.randint(1, 8)):
        messages.append({"role": "user", "content": draw.choice(ANSWERS) or "q"})
        if with_tools and draw.random() < 0.4:
            call = CALL | {"function": {"name": "w", "arguments": draw.choice([{"x": "y"}, '{"x": "y"}'])}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": CALL["id"], "content": "result", "name": "w"})
        messages.append({"role": "assistant", "content": draw.choice(ANSWERS)})
        if with_thinking and draw.random() < 0.5:
            messages[-1]["reasoning_content"] = "I think so"
    return messages


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_trained_tokens_are_those_of_a_brute_force_reference(template: str) -> None:
    tokenizer, draw = tokenizer_of(template), random.Random(template)
    refusals = set()
    for number in range(CONVERSATIONS):
        tools = [{"type": "function", "function": FUNCTION}] if number % 4 == 1 else None
        messages = conversation(draw, bool(tools), number % 4 == 2 and template != "qwen3_5_nothink")
        try:
            example = sft_text(tokenizer, messages, "here", tools)
        except DatasetError as error:
            refusals |= {reason for reason in REFUSALS.get(template, ()) if re.search(reason, str(error))} or {error}
            continue
        (row,) = encode_sft(tokenizer, [example])
        trained = [example.text[start:end] for start, end in example.spans]
        assert trained == reference(tokenizer, template, example.text, messages, tools)
        assert row == encode_pieces(tokenizer, example)
    assert refusals == REFUSALS.get(template, set())


def reference(tokenizer: Any, template: str, text: str, messages: list[Any], tools: list[Any] | None) -> list[str]:
    """Return the text of every trained turn: from the end of its generation prompt to its first stop token."""
    messages = [add_thinking_aliases(prepare_message(message, "here")) for message in messages]
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    stops = [*stop_tokens(tokenizer).values(), *([OTHER_END[template]] if template in OTHER_END else [])]

    def rendered(messages: list[Any], **options: Any) -> str:
        return render_calls(tokenizer, messages, "here", tools=tools, **options)

    trained, position = [], 0
    for index in turns:
        # 1. The turn starts where the conversation leaves its generation prompt; after its header if a tool call
        #    before it is rendered differently there.
        prompt = rendered(messages[:index], add_generation_prompt=True)
        start = common_length(text, prompt)
        if start < position:
            start = text.index(HEADER, position) + len(HEADER)
        # 2. A mark in the answer, or in the arguments of its call, shows its place, unless the answer is empty.
        marked = [dict(message) for message in messages]
        if calls := messages[index].get("tool_calls"):
            marked[index]["tool_calls"] = [calls[0] | {"function": {"name": "w", "arguments": {"x": f"{MARK}y"}}}]
        else:
            marked[index]["content"] = MARK + messages[index]["content"]
        before, _, after = rendered(marked).partition(MARK)
        place = len(before) if text.startswith(before + after) else start
        # 3. It ends with the first stop token.
        end, stop = min((text.find(stop, place), stop) for stop in stops if text.find(stop, place) >= 0)
        end += 0 if stop == OTHER_END.get(template) else len(stop)
        if messages[index].get("reasoning_content", "") in text[position:end]:
            trained.append(MARKED_HEADER.get(template, "") + text[start:end])
        position = end
    return trained


def common_length(first: str, second: str) -> int:
    """Return the characters at the start that are the same, without a part of a special token."""
    length = len(os.path.commonprefix([first, second]))  # noqa: RUF071 - characters are meant
    matches = [*SPECIAL.finditer(first), *SPECIAL.finditer(second)]
    return min([length, *(match.start() for match in matches if match.start() < length < match.end())])


def encode_pieces(tokenizer: Any, example: SFTText) -> dict[str, list[int]]:
    """Return the tokens of the pieces between the borders of the trained text, and a mask of 1 in trained pieces."""
    ids, mask = [], []
    borders = [0, *chain.from_iterable(example.spans), len(example.text)]
    for number, (start, end) in enumerate(pairwise(borders)):
        piece = tokenizer(example.text[start:end], add_special_tokens=False).input_ids
        ids += piece
        mask += [number % 2] * len(piece)
    return {"input_ids": ids, "loss_mask": mask}


@pytest.mark.parametrize("template", TEMPLATES)
def test_joined_turns_equal_the_rendering_of_the_conversation(template: str) -> None:
    tokenizer, draw = tokenizer_of(template), random.Random(template)
    stops = stop_tokens(tokenizer)
    equal = set()
    for _ in range(CONVERSATIONS):
        messages = [turn for turn in conversation(draw, False, False) if turn["role"] != "system"]
        ids = encode_prompt(tokenizer, {"messages": messages[:1]})
        for index in range(1, len(messages) - 1, 2):
            (row,) = encode_sft(tokenizer, [sft_text(tokenizer, messages[: index + 1], "here", None, LAST)])
            answer = [token for token, trained in zip(row["input_ids"], row["loss_mask"], strict=True) if trained]
            assert answer[-1] in stops  # a model that learned the turn stops
            ids += answer + next_turn_ids(tokenizer, messages[index + 1], answer)
        text = render(tokenizer, messages[: len(messages) // 2 * 2 - 1], "here", add_generation_prompt=True)
        equal.add(tokenizer.decode(ids) == text)
    assert equal == ({True, False} if template in REWRITTEN else {True})
