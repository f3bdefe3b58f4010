"""SFT rows: the loss mask comes from token offsets in the rendered text, and covers the answer with what ends it."""

from __future__ import annotations

from typing import Any

import pytest

from archon.data import encode_prompt, sft_dataset
from archon.data.encoding import TurnOptions, encode_sft, sft_text
from archon.data.sources import SourceRow
from archon.rl.bootstrap import CHAT_TEMPLATES
from archon.schema.errors import DatasetError, TokenizerError
from tests.data.toy_tokenizers import (
    BY_NUMBER,
    CALLS_ALONE,
    CHATML,
    NO_END,
    NO_SYSTEM,
    THINKING,
    USERS_ALONE,
    toy_tokenizer,
)

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
USER = {"role": "user", "content": "How many apples?"}
SYSTEM = {"role": "system", "content": "Größe 数学"}


def answer(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def trained_text(tokenizer: Any, messages: list[dict[str, Any]], options: TurnOptions | None = None) -> list[str]:
    """The text of every run of trained tokens."""
    (row,) = encode_sft(tokenizer, [sft_text(tokenizer, messages, "here", options=options)])
    assert len(row["input_ids"]) == len(row["loss_mask"])
    runs: list[list[int]] = []
    for index, (token, trained) in enumerate(zip(row["input_ids"], row["loss_mask"], strict=True)):
        if trained and (index == 0 or not row["loss_mask"][index - 1]):
            runs.append([])
        if trained:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


def test_chat_template_trains_the_answer_and_its_closing_token_alone() -> None:
    tokenizer = toy_tokenizer(CHATML)
    assert trained_text(tokenizer, [SYSTEM, USER, answer("There are 12.")]) == ["There are 12.<|im_end|>"]


def test_every_assistant_turn_is_trained_and_no_other() -> None:
    tokenizer = toy_tokenizer(CHATML)
    conversation = [USER, answer("12"), {"role": "user", "content": "12"}, answer("and 30 数学")]
    assert trained_text(tokenizer, conversation) == ["12<|im_end|>", "and 30 数学<|im_end|>"]


def test_the_tools_of_a_conversation_stand_in_its_prompt_and_its_calls_are_trained() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    talk = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    tokenizer = toy_tokenizer(CHAT_TEMPLATES["chatml"])
    row = SourceRow("line 1", {"messages": [*talk, answer("It is 3.")], "tools": [tool]})
    (encoded,) = sft_dataset([row], "s", tokenizer=tokenizer, prompt_key="messages", response_key=None)
    assert trained_text_of(tokenizer, encoded) == (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>It is 3.<|im_end|>'
    )
    whole = tokenizer.decode(encoded["input_ids"])
    assert whole.startswith('<|im_start|>system\n<tools>\n{"type": "function", "function": {"name": "add"')
    assert "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>" in whole
    prompt = tokenizer.apply_chat_template(talk[:1], tools=[tool], tokenize=False, add_generation_prompt=True)
    assert whole.startswith(prompt)


@pytest.mark.parametrize("thought", ["", "<think>\nhm\n</think>\n\n"])
def test_an_earlier_call_is_trained_unless_the_template_drops_its_thinking(thought: str) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    calling = {"role": "assistant", "content": thought, "tool_calls": [call]}
    talk = [USER, calling, {"role": "tool", "content": "3"}, answer("It is 3.")]
    called = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'
    final = "<think>\n\n</think>\n\nIt is 3.<|im_end|>"
    assert trained_text(toy_tokenizer(THINKING), talk) == ([final] if thought else [called, final])
    options = TurnOptions(stripped_thinking="train")
    assert trained_text(toy_tokenizer(THINKING), talk, options) == [called, final]


@pytest.mark.parametrize(
    ("template", "tools", "message"),
    [
        (None, [TOOL], "it has tools, but the tokenizer has no chat template for them"),
        (CHATML, [TOOL], "it has tools, but the tokenizer's chat template ignores them"),
        (THINKING, '{"type": "function"}', "'tools' must be a list of objects"),
        (THINKING, "[{", "'tools' is no JSON"),
        (THINKING, {"type": "function"}, "'tools' must be a list of objects"),
        (THINKING, ["add"], "'tools' must be a list of objects"),
    ],
)
def test_tools_that_would_not_be_in_the_prompt_are_an_error(template: str, tools: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=f"here: {message}"):
        sft_text(toy_tokenizer(template), [USER, answer("12")], "here", tools=tools)


def test_a_turn_without_its_thinking_is_not_trained_unless_that_is_asked_for() -> None:
    tokenizer = toy_tokenizer(THINKING)
    conversation = [USER, answer("<think>\nhm\n</think>\n\n12"), USER, answer("<think>\nso\n</think>\n\n30")]
    last = "<think>\nso\n</think>\n\n30<|im_end|>"
    assert trained_text(tokenizer, conversation) == [last]
    assert trained_text(tokenizer, conversation, TurnOptions(stripped_thinking="train")) == ["12<|im_end|>", last]
    assert trained_text(tokenizer, [USER, answer("12")]) == ["<think>\n\n</think>\n\n12<|im_end|>"]


def test_the_sft_prefix_is_the_rl_prompt_token_by_token() -> None:
    for template in (CHATML, THINKING, None):
        tokenizer = toy_tokenizer(template)
        messages = [SYSTEM, USER]
        (row,) = encode_sft(tokenizer, [sft_text(tokenizer, [*messages, answer("There are 12.")], "here")])
        prompt = encode_prompt(tokenizer, {"messages": messages})
        assert row["input_ids"][: len(prompt)] == prompt
        assert row["loss_mask"].index(1) == len(prompt)


def test_a_token_across_the_start_of_the_answer_is_split_as_in_generation() -> None:
    tokenizer = toy_tokenizer(None)
    assert tokenizer.tokenize("assistant are") == ["assistant", "Ġare"]  # "assis" and "tant are" give other tokens
    (row,) = encode_sft(
        tokenizer, [sft_text(tokenizer, [{"role": "user", "content": "assis"}, answer("tant are")], "here")]
    )
    prompt = encode_prompt(tokenizer, {"prompt": "assis"})
    assert row["input_ids"] == [*prompt, *tokenizer("tant are")["input_ids"], tokenizer.eos_token_id]
    assert row["loss_mask"] == [0] * len(prompt) + [1] * (len(row["input_ids"]) - len(prompt))


def trained_text_of(tokenizer: Any, row: dict[str, list[int]]) -> str:
    return tokenizer.decode([t for t, m in zip(row["input_ids"], row["loss_mask"], strict=True) if m])


def test_plain_text_is_prompt_response_and_the_end_of_text_token() -> None:
    tokenizer = toy_tokenizer(None)
    (row,) = encode_sft(tokenizer, [sft_text(tokenizer, [USER, answer("There are 12.")], "here")])
    assert tokenizer.decode(row["input_ids"]) == "How many apples?There are 12.<|im_end|>"
    assert trained_text_of(tokenizer, row) == "There are 12.<|im_end|>"


def test_a_leading_token_stands_before_plain_text_and_is_not_trained() -> None:
    tokenizer = toy_tokenizer(None, bos="<s>")
    (row,) = encode_sft(tokenizer, [sft_text(tokenizer, [USER, answer("12")], "here")])
    assert row["input_ids"][0] == tokenizer.bos_token_id == encode_prompt(tokenizer, {"prompt": "12"})[0]
    assert row["input_ids"].count(tokenizer.bos_token_id) == 1
    assert row["loss_mask"][0] == 0


def test_many_rows_are_as_one_by_one() -> None:
    tokenizer = toy_tokenizer(CHATML)
    texts = [sft_text(tokenizer, [USER, answer("数学 " * (n % 7 + 1))], f"row {n}") for n in range(2100)]
    together = encode_sft(tokenizer, texts)
    assert len(together) == 2100
    assert all(together[n] == encode_sft(tokenizer, [texts[n]])[0] for n in (0, 999, 1000, 2099))


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (CHATML, [USER], "here: nothing to train on: the conversation has no assistant turn"),
        (CHATML, [answer("12"), USER], "here: nothing to train on: every assistant turn is masked, or has no prompt"),
        (NO_SYSTEM, [SYSTEM, USER, answer("12")], "here: the chat template refuses .* System role not supported"),
        (BY_NUMBER, [USER, answer("12")], "here: the chat template renders the messages up to number 1 differently"),
        (CHATML.replace("<|im_end|>", ""), [USER, answer("12")], "here: the chat template ends .* would never stop"),
        (NO_END, [USER, answer("12")], "here: the chat template ends the assistant turn 1 with .* would never stop"),
        (CHATML, [USER, answer("12") | {"weight": 0.5}], "here: 'weight' of a message is 0.5; expected 0 or 1"),
        (CHATML, [USER, answer("12") | {"weight": 0}], "here: nothing to train on: every assistant turn is masked"),
        (CHATML, [USER, answer("") | {"tool_calls": [CALL]}], "does not render 'tool_calls' of message 1"),
        (
            CHATML,
            [USER, answer("12") | {"reasoning_content": "hm"}],
            "does not render 'reasoning_content' of message 1",
        ),
        (CALLS_ALONE, [USER, answer("I add.") | {"tool_calls": [CALL]}], "does not render 'content' of message 1"),
        (CHATML, [USER | {"name": "Ada"}, answer("12")], "does not render 'name' of message 0"),
        (USERS_ALONE, [USER, answer("12"), {"role": "tool", "content": "9"}, answer("9")], "'content' of message 2"),
        (CHATML, [USER, answer("") | {"function_call": {"name": "add"}}], "'function_call', which tool_calls replaced"),
        (None, [USER, answer("12"), USER, answer("30")], "here: expected one assistant message, the last"),
        (None, [USER], "here: expected one assistant message"),
        (None, [USER, answer("")], "here: nothing to train on: the response is empty"),
    ],
)
def test_an_example_that_cannot_be_masked_is_an_error(template: str, messages: list[Any], message: str) -> None:
    tokenizer = toy_tokenizer(template)
    with pytest.raises(DatasetError, match=message):
        encode_sft(tokenizer, [sft_text(tokenizer, messages, "here")])


def test_a_tokenizer_that_cannot_do_it_is_refused() -> None:
    source = [SourceRow("f.jsonl:1", {"q": "12", "a": "30"})]
    with pytest.raises(TokenizerError, match="neither a chat template nor an end-of-text token"):
        sft_dataset(source, "f", tokenizer=toy_tokenizer(None, eos=None), prompt_key="q", response_key="a")
    slow = toy_tokenizer(None)
    slow.__class__ = type("Slow", (type(slow),), {"is_fast": property(lambda self: False)})
    with pytest.raises(TokenizerError, match="needs a fast tokenizer"):
        sft_dataset(source, "f", tokenizer=slow, prompt_key="q", response_key="a")


def test_thinking_that_the_answer_repeats_is_still_missed() -> None:
    conversation = [USER, answer("<think>\n12\n</think>\n\n12 apples"), USER, answer("30")]
    assert trained_text(toy_tokenizer(THINKING), conversation) == ["<think>\n\n</think>\n\n30<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "messages", "lost"),
    [
        (CHATML, [USER, answer("") | {"tool_calls": [CALL]}, {"role": "tool", "content": "3"}], "tool_calls"),
        (USERS_ALONE, [USER, answer("12"), {"role": "tool", "content": "9"}, USER], "content"),
    ],
)
def test_a_prompt_of_rl_loses_nothing_either(template: str, messages: list[Any], lost: str) -> None:
    with pytest.raises(DatasetError, match=f"does not render '{lost}'"):
        encode_prompt(toy_tokenizer(template), {"messages": messages})


def test_a_row_without_prompt_is_an_error() -> None:
    with pytest.raises(DatasetError, match=r"the RL row has the keys \['answer'\]; expected `messages` or `prompt`"):
        encode_prompt(toy_tokenizer(CHATML), {"answer": "3"})
