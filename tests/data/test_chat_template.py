"""Trained turns, stop tokens and joined turns by chat templates of every public kind, in random conversations."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from archon.checkpoint.chat_template import chat_template, render, set_template_variables, stop_token_ids
from archon.checkpoint.tokenizer import load_tokenizer, write_tokenizer
from archon.data.encoding import TurnOptions, encode_prompt, next_turn_ids, sft_text
from archon.schema.errors import DatasetError
from tests.data.test_encoding import trained_text
from tests.data.toy_tokenizers import CHATML, THINKING, toy_tokenizer

QUESTION_AND_ANSWER = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
HEAD = "<|im_start|>{{ m.role }}\n"


class Kind(NamedTuple):
    """A template, the tokens that stop generation, and the trained text of a turn by (content, is the last)."""

    template: str
    stops: set[str]
    trained: Callable[[str, bool], str]
    joined: bool = True  # sampled turns equal the template's rendering of the conversation


def ended(content: str, last: bool) -> str:
    return f"{content}<|im_end|>"


KINDS = {
    "chatml": Kind(CHATML, {"<|im_end|>"}, ended),
    # An empty thought in the last turn alone.
    "thinking": Kind(
        THINKING,
        {"<|im_end|>"},
        lambda text, last: ("<think>\n\n</think>\n\n" if last else "") + text.lstrip("\n") + "<|im_end|>",
    ),
    # The prompt opens a thought that earlier turns do not have.
    "opened thought": Kind(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
        "<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
        {"<|im_end|>"},
        lambda content, last: f"\n</think>\n\n{content}<|im_end|>" if last else f"{content}<|im_end|>",
        joined=False,
    ),
    # The start of the next message ends a turn.
    "no end": Kind(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        {"<|im_end|>", "<|user|>"},
        lambda content, last: f"{content}<|user|>",
    ),
    # The end of text follows the whole conversation, as well as an end token after every turn.
    "end of conversation": Kind(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}",
        {"<|im_end|>", "<|end|>"},
        lambda content, last: f"{content}<|end|>",
    ),
    # An earlier turn ends with another token, at which generation does not stop.
    "another end": Kind(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if loop.last and m.role == 'assistant' "
        "and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        {"<|im_end|>", "<|return|>"},
        lambda content, last: f"{content}<|return|>" if last else content,
        joined=False,
    ),
    # White space around the content is removed.
    "trimmed": Kind(
        f"{{% for m in messages %}}{HEAD}{{{{ m.content | trim }}}}<|im_end|>\n{{% endfor %}}{PROMPT}",
        {"<|im_end|>"},
        lambda content, last: f"{content.strip()}<|im_end|>",
    ),
    # The assistant's header belongs to the user's turn; the loop looks ahead and skips the system message.
    "brackets": Kind(
        "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}{% for m in turns %}"
        "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}{{ eos_token }}"
        "{% if not loop.last and turns[loop.index0 + 1].role == 'user' %}\n{% endif %}{% endif %}{% endfor %}",
        {"<|im_end|>"},
        ended,
    ),
    # Marks decide; a mark that ends before the end token is extended by it.
    "marked": Kind(
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ m.content }}"
        f"{{% endgeneration %}}<|im_end|>\n{{% else %}}{HEAD}{{{{ m.content }}}}<|im_end|>\n{{% endif %}}{{% endfor %}}"
        + PROMPT,
        {"<|im_end|>"},
        ended,
    ),
    # A copy replaces every message that is not an assistant's.
    "copies": Kind(
        "{% set ns = namespace(turns=[]) %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% set ns.turns = ns.turns + [m] %}{% else %}{% set ns.turns = ns.turns + "
        "[{'role': m.role, 'content': m.content}] %}{% endif %}{% endfor %}{% for m in ns.turns %}"
        + HEAD
        + "{{ m.content }}<|im_end|>\n{% endfor %}"
        + PROMPT,
        {"<|im_end|>"},
        ended,
    ),
    # A nested loop has items with the names of places in the template.
    "words": Kind(
        "{% for m in messages %}" + HEAD + "{% for word in ['end', 'loop', 'generation', 'end of loop'] %}"
        "{% if false %}{{ word }}{% endif %}{% endfor %}{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT,
        {"<|im_end|>"},
        ended,
    ),
    # Every message is rendered by a macro, and nothing but prefixes tells which text is whose.
    "macro": Kind(
        "{% macro all() %}{% for m in messages %}" + HEAD + "{{ m.content }}<|im_end|>\n{% endfor %}{% endmacro %}"
        "{{ all() }}" + PROMPT,
        {"<|im_end|>"},
        ended,
    ),
}
ANSWERS = ("12", "12", "yes", "no", "", "assistant\nThere are 12.", "<b>数学</b>", "user: <|im_", "\n\n30 ", "Größe 🍐")


def tokenizer_of(kind: Kind) -> Any:
    special = [f"<|{name}|>" for name in ("user", "assistant", "tool", "system", "end", "return", "call")]
    tokenizer = toy_tokenizer(kind.template)
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer


@pytest.mark.parametrize("name", KINDS)
def test_the_trained_text_of_random_conversations_is_every_answer_with_its_end(name: str) -> None:
    kind, draw = KINDS[name], random.Random(name)
    tokenizer = tokenizer_of(kind)
    assert set(tokenizer.convert_ids_to_tokens(list(stop_token_ids(tokenizer)))) == kind.stops
    for _ in range(40):
        answers = [draw.choice(ANSWERS) for _ in range(draw.randint(1, 8))]
        messages = []
        for answer in answers:
            messages += [{"role": "user", "content": draw.choice(ANSWERS)}, {"role": "assistant", "content": answer}]
        expected = [kind.trained(answer, index == len(answers) - 1) for index, answer in enumerate(answers)]
        assert trained_text(tokenizer, messages) == [text for text in expected if text]
        assert trained_text(tokenizer, messages, TurnOptions(train_turns="last")) == expected[-1:]
        skipped = draw.randrange(len(answers))
        messages[2 * skipped + 1]["weight"] = 0
        del expected[skipped]
        if any(expected):
            assert trained_text(tokenizer, messages) == [text for text in expected if text]


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.joined])
def test_a_sampled_turn_is_joined_to_the_next_as_the_template_renders_both(name: str) -> None:
    kind = KINDS[name]
    tokenizer = tokenizer_of(kind)
    first, second = {"role": "user", "content": "How many?"}, {"role": "user", "content": "And pears?"}
    (end,) = [kind.trained("", True).removeprefix("<think>\n\n</think>\n\n")]
    prompt = encode_prompt(tokenizer, {"messages": [first]})
    whole = [first, {"role": "assistant", "content": "12"}, second]
    text = render(tokenizer, whole, "here", add_generation_prompt=True)
    for sampled in ("12" + end, "12"):  # it stopped, or it was cut
        answer = tokenizer(sampled, add_special_tokens=False).input_ids
        joined = prompt + answer + next_turn_ids(tokenizer, second, answer)
        assert tokenizer.decode(joined) == text


def test_an_answer_that_ends_with_another_stop_token_has_one_end() -> None:
    tokenizer = tokenizer_of(KINDS["end of conversation"])
    answer = [*tokenizer("12").input_ids, tokenizer.eos_token_id]
    joined = answer + next_turn_ids(tokenizer, {"role": "user", "content": "30"}, answer)
    assert tokenizer.decode(joined) == "12<|im_end|>\n<|user|>30<|end|>\n<|assistant|>"


def test_the_stops_after_tool_calls_are_stops_and_the_end_of_a_call_is_none() -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
        "{{ call.function.name }}{{ call.function.arguments.items() | list }}</tool_call>{% endfor %}"
        "{% if m.tool_calls %}<|call|>{% else %}<|end|>{% endif %}{% endfor %}"
    )
    tokenizer = tokenizer_of(Kind(template, set(), ended))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    assert tokenizer.convert_ids_to_tokens(list(stop_token_ids(tokenizer))) == ["<|im_end|>", "<|end|>", "<|call|>"]


@pytest.mark.parametrize("as_text", [True, False])
def test_arguments_as_json_are_rendered_as_objects_and_as_json_where_the_template_wants_text(as_text: bool) -> None:
    arguments = "call.function.arguments" + ("" if as_text else ".items() | list | string")
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.name + '|' + " + arguments + " }}{% endfor %}<|im_end|>\n{% endfor %}" + PROMPT
    )
    for given in ('{"a": 1}', {"a": 1}):
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": given}}
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        rendered = '{"a": 1}' if as_text else "[('a', 1)]"
        assert trained_text(toy_tokenizer(template), messages) == [f"add|{rendered}<|im_end|>"]


def test_the_text_is_that_of_the_tokenizer_with_its_options() -> None:
    tokenizer = toy_tokenizer("{% if enable_thinking %}think {% endif %}{{ bos_token }}" + CHATML, bos="<s>")
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    rendering = chat_template(tokenizer, enable_thinking=True).render(messages, "here")
    assert rendering.text == render(tokenizer, messages, "here", enable_thinking=True)
    assert [rendering.text_of(index) for index in range(2)] == [
        "<|im_start|>user\nq<|im_end|>\n",
        "<|im_start|>assistant\na<|im_end|>\n",
    ]


@pytest.mark.parametrize("start", ["", "\n", "  "])
def test_variables_become_defaults_of_the_template_that_is_saved(start: str, tmp_path: Path) -> None:
    source = start + "{% if enable_thinking is defined %}{{ enable_thinking }}{{ names }}{% endif %}" + CHATML
    tokenizer, plain = toy_tokenizer(source), toy_tokenizer(source)
    variables = {"enable_thinking": False, "names": ["it's", None, 1.5]}
    expected = render(plain, QUESTION_AND_ANSWER, "here", **variables)
    for _ in range(2):  # the second time changes nothing
        set_template_variables(tokenizer, variables)
        assert render(tokenizer, QUESTION_AND_ANSWER, "here") == expected
    other = render(plain, QUESTION_AND_ANSWER, "here", **variables | {"enable_thinking": True})
    assert render(tokenizer, QUESTION_AND_ANSWER, "here", enable_thinking=True) == other
    assert sft_text(tokenizer, QUESTION_AND_ANSWER, "here").text == expected
    write_tokenizer(tmp_path, tokenizer, None)
    loaded = load_tokenizer(str(tmp_path))
    assert render(loaded, QUESTION_AND_ANSWER, "here") == expected
    template = loaded.chat_template
    set_template_variables(loaded, variables)
    assert loaded.chat_template == template
    with pytest.raises(DatasetError, match="set the same values in all data"):
        set_template_variables(loaded, {"enable_thinking": True})
    again = load_tokenizer(str(tmp_path))  # a later run may choose other values
    set_template_variables(again, {"enable_thinking": True})
    assert render(again, QUESTION_AND_ANSWER, "here") == other


def test_a_prompt_that_obeys_the_user_is_not_trained() -> None:
    unthinking = "<think></think>"
    template = CHATML.replace(
        "<|im_start|>assistant\n{% endif %}",
        "<|im_start|>assistant\n{% if '/no_think' in messages[-1].content %}" + unthinking + "{% endif %}{% endif %}",
    ).replace(
        "{{ message.content }}",
        "{% if message.role == 'assistant' and '/no_think' in messages[loop.index0 - 1].content %}"
        + unthinking
        + "{% endif %}{{ message.content }}",
    )
    tokenizer = toy_tokenizer(template)
    stop_token_ids(tokenizer)  # caches the prompt of another question
    for question in ("12", "12 /no_think"):
        talk = [{"role": "user", "content": question}, {"role": "assistant", "content": "30"}]
        assert trained_text(tokenizer, talk) == ["30<|im_end|>"]


def test_a_template_whose_marks_are_in_a_macro_is_refused() -> None:
    template = (
        "{% macro turn(m) %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ turn(m) }}{% endfor %}"
    )
    with pytest.raises(DatasetError, match="marks in a macro; move them out"):
        trained_text(toy_tokenizer(template), QUESTION_AND_ANSWER)


def test_a_variable_that_the_template_does_not_have_is_refused() -> None:
    tokenizer = toy_tokenizer("{% if enable_thinking %}{% endif %}" + CHATML)
    for name in ("enable_thinkin", "tools"):
        with pytest.raises(DatasetError, match=f"the chat template has no variable '{name}'"):
            set_template_variables(tokenizer, {name: False})


def test_arguments_that_a_template_concatenates_are_json() -> None:
    template = CHATML.replace(
        "{{ message.content }}",
        "{{ message.content }}{% for call in message.tool_calls or [] %}"
        "{{ call.function.name ~ call.function.arguments }}{% endfor %}",
    )
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": true}'}}
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert trained_text(toy_tokenizer(template), talk) == ['add{"a": true}<|im_end|>']
