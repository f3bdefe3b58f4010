"""Chat templates that would take the machine's time or memory are refused while they run, by name."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from archon.checkpoint.chat_template import chat_template, render
from archon.checkpoint.template_sandbox import MAX_SECONDS, MAX_TEXT, bounded_chat_template
from archon.checkpoint.tokenizer import load_tokenizer
from archon.schema.errors import DatasetError, TokenizerError
from tests.conftest import find_data
from tests.data.toy_tokenizers import toy_tokenizer

TALK = [{"role": "user", "content": "a question"}]
LONG = "{% set s = 'a' * 9999999 %}"


def doubled(start: str, step: str, use: str = "{{ n.x }}") -> str:
    loop = "{% for i in range(60) %}{% set n.x = STEP %}{% endfor %}"
    return f"{{% set n = namespace(x={start}) %}}{loop.replace('STEP', step)}{use}"


TIME = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops that select nothing": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}"
    "{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for i in [1] recursive %}{% if loop.depth0 < 60 %}{{ loop([1]) }}{{ loop([1]) }}{% endif %}"
    "{% endfor %}",
    "tests": "{% set r = range(99999) | list %}{{ range(99999) | select('in', r * 9) | list | length }}"
    "{% for i in range(99999) %}{{ range(99999) | select('in', [i]) | list | length }}{% endfor %}",
}
MEMORY = {
    "multiplied text": "{{ 'a' * 9000000000 }}",
    "multiplied text, from the left": "{{ 9000000000 * 'a' }}",
    "multiplied list": "{{ ([1] * 2000000000) | length }}",
    "text that is added to itself": doubled("'a'", "n.x + n.x"),
    "text that is joined with itself": doubled("'a'", "n.x ~ n.x"),
    "text with an own text": doubled("'a'", "n.x.join([n.x, n.x, n.x])"),
    "text that is replaced": doubled("'aa'", "n.x | replace('a', n.x)"),
    "text that replaces": doubled("'aa'", "n.x.replace('a', n.x)"),
    "text that is translated": LONG + "{{ s.translate({97: s}) }}",
    "list of lists": doubled("[1]", "[n.x, n.x]"),
    "list of lists in JSON": doubled("[1]", "[n.x, n.x]", "{{ n.x | tojson }}"),
    "mapping of mappings": doubled("dict()", "{'a': n.x, 'b': n.x}"),
    "mapping of mappings by a call": doubled("dict()", "dict(a=n.x, b=n.x)"),
    "list that is added to itself": doubled("[1]", "n.x + n.x"),
    "namespaces": "{% set n = namespace() %}{{ [n] }}",
    "formatted": "{{ '%9999999999d' % 1 }}",
    "formatted by a width": "{{ '%*d' % (999999999, 1) }}",
    "formatted by a filter": "{{ '%9999999999d' | format(1) }}",
    "formatted by a method": "{{ '{:9999999999}'.format(1) }}",
    "formatted by a method's width": "{{ '{:{}}'.format(1, 999999999) }}",
    "formatted often": LONG + "{{ ('{0}' * 1000).format(s) }}",
    "centered": "{{ 'a' | center(9999999999) }}",
    "justified": "{{ 'a'.ljust(9999999999) }}",
    "filled": "{{ 'a'.zfill(9999999999) }}",
    "tabs": "{{ '\t'.expandtabs(9999999999) }}",
    "indented": "{{ 'a\nb' | indent(9999999999) }}",
    "indented JSON": "{{ [1] | tojson(indent=9999999999) }}",
    "wrapped": LONG + "{{ s | wordwrap(1, True, s) }}",
    "batches": "{{ [1] | batch(9999999999, 0) | list | length }}",
    "slices": "{{ [1] | slice(9999999999) | list | length }}",
    "bytes": "{{ (1).to_bytes(9999999999, 'big') | length }}",
    "words": "{{ lipsum(n=9999999) }}",
    "joined": LONG + "{{ range(99999) | join(s) }}",
    "filter block": "{% filter center(9999999999) %}a{% endfilter %}",
    "powers": "{{ 10 ** 10000000000 }}",
    "squares": doubled("9", "n.x * n.x"),
    "rounding": "{{ 1.5 | round(9999999999, 'ceil') }}",
    "own text in a macro": "{% macro f() %}{% for i in range(99999) %}"
    + "a" * 9999
    + "{% endfor %}{% endmacro %}{{ f() }}",
    "own text in a block": "{% set x %}{% for i in range(99999) %}" + "a" * 9999 + "{% endfor %}{% endset %}",
    "own text": "{% for i in range(99999) %}" + "a" * 9999 + "{% endfor %}",
    "output": LONG + "{% for i in range(99999) %}{{ s }}{% endfor %}",
    "variables": LONG + "".join(f"{{% set s{i} = s[1:] %}}" for i in range(999)),
    "filtered variables": LONG + "".join(f"{{% set s{i} = s | upper %}}" for i in range(999)),
    "length": "a" * (2**18 + 1),
}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def refused(template: str, ways: int = 2) -> str:
    """Return the error of rendering, which both ways to render give, and check its time and memory."""
    tokenizer: Any = toy_tokenizer(template)
    message = ""
    for way in (lambda: render(tokenizer, TALK, "row 7"), lambda: chat_template(tokenizer).render(TALK, "row 7"))[
        :ways
    ]:
        memory, start = peak_bytes(), time.monotonic()
        with pytest.raises(TokenizerError, match=r"row 7: the chat template of .* is refused: it ") as raised:
            way()
        assert time.monotonic() - start < MAX_SECONDS + 5  # a step that has begun is finished
        assert peak_bytes() - memory < 3 * 2**28
        message = str(raised.value)
        assert "\n" not in message
    return message


@pytest.mark.slow
@pytest.mark.parametrize("name", TIME)
def test_a_template_without_end_is_refused(name: str) -> None:
    assert "it takes more than" in refused(TIME[name], ways=1)


def test_long_loops_are_refused_in_every_way_to_render(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a workflow calls `apply_chat_template` itself; the error names the template's file."""
    monkeypatch.setattr("archon.checkpoint.template_sandbox.MAX_STEPS", 10_000)
    toy_tokenizer(TIME["loops"].replace("99999", "300")).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="steps"):
        tokenizer.apply_chat_template(TALK)
    for way in (lambda: render(tokenizer, TALK, "row 7"), lambda: chat_template(tokenizer).render(TALK, "row 7")):
        with pytest.raises(TokenizerError, match=f"row 7: the chat template of {tmp_path}/chat_template.jinja is"):
            way()


def test_time_ends_a_template_whose_steps_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archon.checkpoint.template_sandbox.MAX_SECONDS", 0.2)
    template = LONG + "{% set t = s[1:] %}{% for i in range(99999) %}{% if s.count('b') %}{% endif %}{% endfor %}"
    with pytest.raises(TokenizerError, match=r"takes more than 0\.2 s"):
        render(toy_tokenizer(template), TALK, "row 7")


@pytest.mark.parametrize("name", MEMORY)
def test_a_template_that_makes_too_much_is_refused(name: str) -> None:
    refused(MEMORY[name])


@pytest.mark.parametrize("codec", ["idna", "punycode", "unicode_escape"])
def test_slow_codecs_are_refused(codec: str) -> None:
    assert codec in refused(f"{{{{ 'a'.encode('{codec}') }}}}")


def test_a_macro_that_calls_itself_without_end_is_an_error_of_one_line() -> None:
    template = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    with pytest.raises(DatasetError, match=r"row 7: the chat template refuses .*RecursionError") as raised:
        render(toy_tokenizer(template), TALK, "row 7")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 'a' * 3 ~ 2 ** 5 ~ 7 % 4 ~ ('%s-%d' % ('b', 3)) ~ [1, 'c'] ~ (1,) ~ {'d': 2} }}", None),
        ("{{ '{}:{:>4}'.format(1, 'x') }}{{ '%s' | format(3) }}{{ ['a', 'b'] | join(', ') }}", "1:   x3a, b"),
        ("{{ messages | map(attribute='role') | join('|') }}{{ messages | join('-', 'role') }}", "useruser"),
        ("{{ 'a\nb' | indent(2) }}{{ 'x' | center(5) }}{{ 'aXa' | replace('a', 'bb') }}", "a\n  b  x  bbXbb"),
        ("{{ {'a': [1, {'b': 2}]} | tojson(indent=2) }}", '{\n  "a": [\n    1,\n    {\n      "b": 2\n    }\n  ]\n}'),
        ("{% for i in range(4) if i % 2 %}{{ loop.index }}{{ loop.last }}{% else %}none{% endfor %}", "1False2True"),
        (
            "{% for i in [] %}{% else %}none{% endfor %}{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}",
            "nonea1",
        ),
        (
            "{% macro f(x) %}[{{ x }} & <]{{ caller() if caller }}{% endmacro %}{% call f(1) %}c{% endcall %}",
            "[1 & <]c",
        ),
        (
            "{% autoescape true %}{% macro f() %}<b>{{ '<' }}{% endmacro %}{{ f() ~ '>' }}{% endautoescape %}",
            "<b>&lt;&gt;",
        ),
        (
            "{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ [3, 1] | sort }}{{ 'abc'[::-1] }}",
            "2[1, 3]cba",
        ),
        ("{% for i in [[1, [2]]] recursive %}{{ i if i is number else loop(i) }};{% endfor %}", "1;2;;;"),
    ],
)
def test_the_limits_change_no_text(template: str, text: str | None) -> None:
    import jinja2

    tokenizer: Any = toy_tokenizer(template)
    expected = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    if "tojson" not in template:  # jinja's own escapes HTML
        assert render(tokenizer, TALK, "row 7") == expected.render(messages=TALK)
    assert render(tokenizer, TALK, "row 7") == chat_template(tokenizer)._run([{**TALK[0]}], "row 7", None, False).text
    assert text is None or render(tokenizer, TALK, "row 7") == text


def test_a_long_conversation_is_rendered() -> None:
    """Four messages of a million characters, and 10,000 short ones."""
    turn = "'<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>'"
    template = f"{{% for m in messages %}}{{{{ {turn} }}}}{{% endfor %}}"
    tokenizer: Any = toy_tokenizer(template)
    for talk in ([{"role": "user", "content": "a" * 2**20}] * 4, TALK * 10_000):
        assert len(render(tokenizer, talk, "row 7")) == sum(len(m["content"]) + 27 for m in talk) < MAX_TEXT


TEMPLATES = sorted(((find_data() or Path()) / "chat_templates").glob("*.jinja")) or [Path("none")]
CALL = {
    "type": "function",
    "id": "call00000",
    "function": {"name": "search", "arguments": {"query": 'it\'s \\n "é😀"'}},
}
TOOL = {"type": "function", "function": {"name": "search", "description": "", "parameters": {"type": "object"}}}
LONG_TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": 'What\'s \\up, "é😀"?\n{{ x }}'},
    {"role": "assistant", "content": "", "reasoning_content": "It must search.", "tool_calls": [CALL]},
    {"role": "tool", "name": "search", "tool_call_id": "call00000", "content": "found"},
    {"role": "assistant", "content": "An answer."},
]


def both(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> list[Any]:
    """Return the result of `apply_chat_template` of transformers, and of the one with limits; or their errors."""
    results: list[Any] = []
    for apply in (tokenizer.apply_chat_template, bounded_chat_template(tokenizer.apply_chat_template)):
        try:
            result = apply(messages, **options)
            results.append(dict(result) if options.get("tokenize") else result)
        except (ValueError, TypeError, TemplateError) as error:
            results.append((type(error), str(error)))
    return results


@pytest.mark.data
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_released_templates_give_the_text_of_transformers(path: Path) -> None:
    tokenizer: Any = toy_tokenizer(path.read_text())
    texts = []
    for tools in (None, [TOOL]):
        for messages in (LONG_TALK[1:3], LONG_TALK[1:2] + LONG_TALK[-1:], LONG_TALK[:2] + LONG_TALK[-1:], LONG_TALK):
            cases: list[dict[str, Any]] = [{}, {"add_generation_prompt": True}, {"enable_thinking": False}]
            cases += [{"continue_final_message": True}] * (messages[-1]["content"] == "An answer.")
            for options in cases:
                plain, bounded = both(tokenizer, messages, tools=tools, tokenize=False, bos_token="<s>", **options)
                assert bounded == plain
                texts += [plain] * isinstance(plain, str)
    assert any("An answer." in text for text in texts)
    masked = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    for options in ({"tokenize": True}, {"tokenize": True, "sanitize_control_tokens": True}, masked):
        plain, bounded = both(tokenizer, LONG_TALK[1:2] + LONG_TALK[-1:], bos_token="<s>", **options)
        assert bounded == plain and isinstance(plain, dict)
        if "training" in path.stem and options is masked:
            assert 0 < sum(plain["assistant_masks"]) < len(plain["input_ids"])


def test_a_template_cannot_render_a_template() -> None:
    """It would begin with a new budget."""
    tokenizer: Any = toy_tokenizer("{{ 'a' | archon_parts }}")
    render(toy_tokenizer("a"), TALK, "row 7")
    with pytest.raises(DatasetError, match="No filter named 'archon_parts'"):
        render(tokenizer, TALK, "row 7")


def test_conversations_of_a_batch_and_named_templates_are_rendered() -> None:
    tokenizer: Any = toy_tokenizer("{{ messages[0].content }}")
    assert bounded_chat_template(tokenizer.apply_chat_template)([TALK, TALK], tokenize=False) == ["a question"] * 2
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools", "other": "{{ tools }}"}
    apply = bounded_chat_template(tokenizer.apply_chat_template)
    assert apply(TALK, tokenize=False) == "plain"
    assert apply(TALK, [TOOL], tokenize=False) == "with tools"
    assert apply(TALK, None, None, "other", True, tokenize=False) == "None"
