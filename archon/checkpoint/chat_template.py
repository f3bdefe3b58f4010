"""Render conversations by a chat template, and find the text and the end token of every assistant turn.

The spans are exact by construction: the template runs once, with a probe inserted into each of its loops. The probe
reports the message of the iteration and the length of the text so far, so the text between two reports belongs to one
message. No text is searched, so repeated answers and templates that rewrite earlier turns are handled.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from archon.checkpoint.template_sandbox import LimitedTemplate, TemplateLimitError, bounded_chat_template, new_sandbox
from archon.schema.errors import DatasetError, TokenizerError

Message = dict[str, Any]  # {"role": "user", "content": "…"}
Span = tuple[int, int]
# Number of the message (-1: another item of a loop) or name of the place, and the length of the text so far.
Report = tuple[int | str, int]

SEPARATOR = "prompt_separator"  # key of tokenizer_config.json
THINKING_FIELDS = ("reasoning_content", "thinking", "reasoning")
QUESTION: Message = {"role": "user", "content": "question"}
PROBE_TEXT = "a text that no template writes by itself"
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
_MAX_REASON = 2000  # characters of a template's own error
_ITEM, _PLACE = "archon_item", "archon_place"  # probes: filters of the instrumented template
_CALLS = [
    {"type": "function", "id": f"call0000{index}", "function": {"name": name, "arguments": {"x": "y"}}}
    for index, name in enumerate(("first_tool", "second_tool"))
]


def has_chat_template(tokenizer: Any) -> bool:
    """Return whether the tokenizer has a chat template; without one conversations are rendered as plain text."""
    return bool(getattr(tokenizer, "chat_template", None))


def render(
    tokenizer: Any, messages: Sequence[Message], where: str, add_generation_prompt: bool = False, **options: Any
) -> str:
    """Return the chat template's text of a conversation; `options` (tools) are passed to the template.

    Raises:
        DatasetError: the template fails; names `where`.
        TokenizerError: the template exceeds a limit; names its file.
    """
    apply = bounded_chat_template(tokenizer.apply_chat_template)
    try:
        text = apply(list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **options)
    except TemplateLimitError as error:
        raise _limit_error(tokenizer, where, error) from error
    except Exception as error:  # a template is a program: it divides by zero, or calls itself without end
        raise _template_error(messages, where, error) from error
    return str(text)


def render_calls(tokenizer: Any, messages: Sequence[Message], where: str, **options: Any) -> str:
    """Render with tool-call arguments as objects, or as JSON if the template rejects objects."""
    try:
        return render(tokenizer, messages, where, **options)
    except DatasetError:
        if not any(message.get("tool_calls") for message in messages):
            raise
        try:
            return render(tokenizer, dump_arguments(messages), where, **options)
        except DatasetError:
            pass
        raise  # the first failure, of the usual form


def dump_arguments(messages: Sequence[Message]) -> list[Message]:
    """Return messages with tool-call arguments as JSON strings."""
    dumped = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            calls.append({**call, "function": {**call["function"], "arguments": arguments}})
        dumped.append({**message, "tool_calls": calls} if calls else message)
    return dumped


@dataclass(frozen=True)
class Rendering:
    """Text of a conversation.

    Attributes:
        text: full text.
        segments: characters of every message; empty if the template drops the message.
        generated: characters inside `{% generation %}` marks; None if the template has none.
        hidden_marks: whether a macro has such marks, which are not observed.
    """

    text: str
    segments: tuple[Span, ...]
    generated: tuple[Span, ...] | None
    hidden_marks: bool = False

    def text_of(self, index: int) -> str:
        """Return the text of a message."""
        return self.text[slice(*self.segments[index])]

    def outside(self, role: str) -> str:
        """Return where the text of a message without a segment may be: anywhere for a system message, else outside."""
        if role == "system":
            return self.text
        borders = [0, *chain.from_iterable(self.segments), len(self.text)]
        return "".join(self.text[start:end] for start, end in zip(borders[::2], borders[1::2], strict=True))


@dataclass
class ChatTemplate:
    """Chat template of a tokenizer with fixed options.

    Args:
        tokenizer: tokenizer with a chat template.
        options: variables of the template (`enable_thinking`).
    """

    tokenizer: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    _headers: dict[tuple[str, bool], str] = field(default_factory=dict, repr=False)

    def render(
        self,
        messages: Sequence[Message],
        where: str,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> Rendering:
        """Render a conversation, with the characters of every message.

        Raises:
            DatasetError: the template fails, or its text cannot be divided into messages; names `where`.
            TokenizerError: the template exceeds a limit; names its file.
        """
        plain = [{**add_thinking_aliases(message)} for message in messages]  # one object each: the probe compares ids
        calls = any(message.get("tool_calls") for message in plain)
        if calls and self._wants_json:
            plain = [{**message} for message in dump_arguments(plain)]
        try:
            return self._run(plain, where, tools, add_generation_prompt)
        except DatasetError:
            if not calls or self._wants_json:
                raise
            return self._run([{**message} for message in dump_arguments(plain)], where, tools, add_generation_prompt)

    def _run(
        self, messages: list[Message], where: str, tools: Sequence[Any] | None, add_generation_prompt: bool
    ) -> Rendering:
        index_of = {id(message): index for index, message in enumerate(messages)}
        chunks: list[str] = []
        length = 0
        reports: list[Report] = []

        def report_item(item: object) -> str:
            reports.append((index_of.get(id(item), -1), length))
            return ""

        def report_place(place: str) -> str:
            reports.append((place, length))
            return ""

        try:
            template, marks, hidden_marks = _instrumented(self.tokenizer.get_chat_template(tools=tools))
            variables = {
                **self.tokenizer.special_tokens_map,
                **self.options,
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                _ITEM: report_item,
                _PLACE: report_place,
            }
            for chunk in template.generate(**variables):
                chunks.append(chunk)
                length += len(chunk)
        except TemplateLimitError as error:
            raise _limit_error(self.tokenizer, where, error) from error
        except Exception as error:
            raise _template_error(messages, where, error) from error
        text = "".join(chunks)
        segments = _message_spans(reports, len(messages))
        if segments is None or any(
            start == end and message["role"] == "assistant"
            for message, (start, end) in zip(messages, segments, strict=True)
        ):  # the template loops over numbers, or over copies of messages
            segments = self._by_prefixes(messages, text, where, tools)
        return Rendering(text, segments, _marked_spans(reports) if marks else None, hidden_marks)

    def _by_prefixes(
        self, messages: list[Message], text: str, where: str, tools: Sequence[Any] | None
    ) -> tuple[Span, ...]:
        """Divide the text by rendering every prefix: for a template that does not loop over `messages` itself."""
        ends = [0]
        for index in range(1, len(messages) + 1):
            try:
                prefix = render(self.tokenizer, messages[:index], where, tools=tools, **self.options)
            except DatasetError:  # such as a lone system message
                ends.append(ends[-1])
                continue
            if not text.startswith(prefix):
                raise DatasetError(
                    f"{where}: the chat template renders the messages up to number {index} differently when others "
                    "follow, so the text of an assistant turn is unknown; put {% generation %} marks around assistant "
                    "turns in the template"
                )
            ends.append(len(prefix))
        return tuple(pairwise(ends))

    def header(self, messages: Sequence[Message], where: str, tools: Sequence[Any] | None) -> str:
        """Return the generation prompt after `messages`: the text that starts the assistant's turn."""
        key = (messages[-1]["role"], bool(tools))
        if key in self._headers and not self._header_follows_text:
            return self._headers[key]
        rendering = self.render(messages, where, tools, add_generation_prompt=True)
        self._headers[key] = rendering.text[max(end for _, end in rendering.segments) :]
        return self._headers[key]

    @cached_property
    def opens_thinking(self) -> bool:
        """Whether the generation prompt ends with `<think>`, as in Qwen3.5 and DeepSeek R1."""
        try:
            return self.header([QUESTION], "a probe", None).rstrip().endswith("<think>")
        except DatasetError:
            return False

    @cached_property
    def _header_follows_text(self) -> bool:
        """Whether the generation prompt depends on the user message (some templates obey /no_think)."""
        headers = set()
        for suffix in ("", " /no_think", " /nothink"):
            question = {"role": "user", "content": f"question{suffix}"}
            rendering = self.render([question], "a probe", add_generation_prompt=True)
            headers.add(rendering.text[rendering.segments[0][1] :])
        return len(headers) > 1

    def header_length(self, header: str, turn: str) -> int:
        """Return how many characters of an assistant turn belong to its header, the generation prompt.

        Templates that prompt for thinking leave the end of the prompt out of a turn that has none.
        """
        if turn.startswith(header):
            return len(header)
        return _common_length(header[: _common_length(header, self._earlier_turn)], turn)

    @cached_property
    def _earlier_turn(self) -> str:
        return self.render([QUESTION, {"role": "assistant", "content": PROBE_TEXT}, QUESTION], "a probe").text_of(1)

    def renders(self, **fields: Any) -> bool:
        """Return whether the last assistant message shows `PROBE_TEXT`, which `fields` of the message hold."""
        try:
            rendering = self.render([QUESTION, {"role": "assistant", "content": "answer", **fields}], "a probe")
        except DatasetError:
            return False
        return PROBE_TEXT in rendering.text

    @cached_property
    def _wants_json(self) -> bool:
        """Whether tool arguments must be JSON strings; the template would print an object as `{'x': 'y'}`."""
        message = {"role": "assistant", "content": "", "tool_calls": _CALLS[:1]}
        try:
            return "{'x'" in self._run([{**QUESTION}, message], "a probe", None, False).text
        except DatasetError:
            return False

    @cached_property
    def renders_calls(self) -> bool:
        """Whether the template renders tool calls."""
        call = {"type": "function", "id": "call00000", "function": {"name": PROBE_TEXT, "arguments": {"x": "y"}}}
        return self.renders(content="", tool_calls=[call])

    @cached_property
    def renders_tools(self) -> bool:
        """Whether the template renders tool definitions."""
        function = {"name": PROBE_TEXT, "description": "", "parameters": {"type": "object", "properties": {}}}
        try:
            rendering = self.render([QUESTION], "a probe", [{"type": "function", "function": function}])
        except DatasetError:
            return False
        return PROBE_TEXT in rendering.text

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """Special tokens of the tokenizer, the longest first."""
        tokens = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        return tuple(sorted(tokens, key=len, reverse=True))

    @cached_property
    def end_of_answer(self) -> str | None:
        """Special token that ends an assistant turn without tool calls; None if the template writes none."""
        return self._end_token({"role": "assistant", "content": PROBE_TEXT}, QUESTION)

    @cached_property
    def end_of_calls(self) -> str | None:
        """Special token that ends an assistant turn with tool calls; None if the template writes none."""
        if not self.renders_calls:
            return None
        result = {"role": "tool", "content": "result", "tool_call_id": _CALLS[0]["id"], "name": "first_tool"}
        for calls in (_CALLS, _CALLS[:1]):  # a template may refuse two calls
            if token := self._end_token({"role": "assistant", "content": "", "tool_calls": calls}, result):
                return token
        return None

    def _end_token(self, message: Message, following: Message) -> str | None:
        """Return the special token at the end of a last message, or else the one that starts the message after it."""
        try:
            rendering = self.render([QUESTION, message], "a probe")
        except DatasetError:
            return None
        header = self.header([QUESTION], "a probe", None)
        turn = rendering.text_of(1).removeprefix(header)
        token = self.special_suffix(turn)
        if token and turn.count(token) == 1:  # a token that follows every call, such as </tool_call>, ends no turn
            return token
        if token := self.special_prefix(rendering.text[rendering.segments[1][1] :]):
            return token
        try:
            token = self.special_prefix(self.render([QUESTION, message, following], "a probe").text_of(2))
        except DatasetError:
            return None
        return None if token == self.special_prefix(header) else token  # every message starts with it

    def special_suffix(self, text: str) -> str | None:
        """Return the special token at the end of a text, before white space."""
        text = text.rstrip()
        return next((token for token in self.special_tokens if text.endswith(token)), None)

    def special_prefix(self, text: str) -> str | None:
        """Return the special token at the start of a text, after white space."""
        text = text.lstrip()
        return next((token for token in self.special_tokens if text.startswith(token)), None)


def chat_template(tokenizer: Any, **options: Any) -> ChatTemplate:
    """Return the chat template of a tokenizer: one object per tokenizer and options, which keeps its probes."""
    templates = _TEMPLATES.setdefault(tokenizer, {})
    key = json.dumps([tokenizer.chat_template, options], sort_keys=True, default=repr)
    if key not in templates:
        # A proxy, since a strong reference would keep the key of the weak dictionary alive.
        templates[key] = ChatTemplate(weakref.proxy(tokenizer), options)
    return templates[key]


_TEMPLATES: weakref.WeakKeyDictionary[Any, dict[str, ChatTemplate]] = weakref.WeakKeyDictionary()


# Variables that every chat template receives.
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})


def unknown_variable(source: str, names: Iterable[str]) -> str | None:
    """Return the first name that is no variable of a chat template, or that archon sets; None if all may be set."""
    unknown = (name for name in names if name in _RESERVED or not re.search(rf"\b{re.escape(name)}\b", source))
    return next(unknown, None)


def stop_token_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that end an answer.

    They are the tokenizer's end-of-text id, the ids of the checkpoint's generation config (which `load_tokenizer`
    reads), and the tokens with which the chat template ends an assistant turn.
    """
    ids = [getattr(tokenizer, "eos_token_id", None), *getattr(tokenizer, "checkpoint_stop_ids", ())]
    if has_chat_template(tokenizer) and isinstance(tokenizer.chat_template, str | dict):
        chat = chat_template(tokenizer)
        ends = [token for token in (chat.end_of_answer, chat.end_of_calls) if token]
        ids += tokenizer.convert_tokens_to_ids(ends)
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def stop_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the text of each stop token of the vocabulary, by its id."""
    ids = stop_token_ids(tokenizer)
    return {number: token for number, token in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True) if token}


def prompt_separator(tokenizer: Any) -> str:
    """Return the text between prompt and answer without a chat template: the tokenizer's `prompt_separator`, or ""."""
    return str(getattr(tokenizer, "init_kwargs", {}).get(SEPARATOR, ""))


def set_prompt_separator(tokenizer: Any, separator: str) -> None:
    """Set `prompt_separator`; the tokenizer is saved with it.

    Raises:
        DatasetError: the tokenizer has a chat template, or another separator.
    """
    if has_chat_template(tokenizer):
        raise DatasetError(
            f"separator is {separator!r}, but the tokenizer has a chat template, which formats prompts; remove it"
        )
    if tokenizer.init_kwargs.setdefault(SEPARATOR, separator) != separator:
        raise DatasetError(
            f"separator is {separator!r}, but the tokenizer was used with {prompt_separator(tokenizer)!r}; a model "
            "needs one separator in all its data"
        )


def set_template_variables(tokenizer: Any, variables: Mapping[str, Any]) -> None:
    """Set defaults of variables of the chat template (`enable_thinking`); the tokenizer is saved with them.

    They replace the defaults with which a loaded tokenizer was saved.

    Raises:
        DatasetError: the template has no such variable, or this object was given other defaults before.
    """
    if not variables:
        return
    source = json.dumps(getattr(tokenizer, "chat_template", None))
    if (name := unknown_variable(source, variables)) is not None:
        raise DatasetError(f"chat_template_kwargs: the chat template has no variable {name!r}; remove it")
    used = getattr(tokenizer, "template_variables", None)
    if used == variables:
        return
    if used is not None:
        raise DatasetError(
            f"chat_template_kwargs is {dict(variables)}, but other data of this run has {used}; set the same values in "
            "all data"
        )
    # The first default of a variable counts. transformers removes the line feed after a block.
    prefix = ""
    for name, value in variables.items():
        prefix += f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}"
    prefix += "\n"
    template = tokenizer.chat_template
    named = template if isinstance(template, dict) else {"": template}
    named = {name: text if text.startswith(prefix) else prefix + text for name, text in named.items()}
    tokenizer.chat_template = named if isinstance(template, dict) else named[""]
    tokenizer.template_variables = dict(variables)


def add_thinking_aliases(message: Message) -> Message:
    """Return a message with its thinking under each name that templates read."""
    thinking = next((message[key] for key in THINKING_FIELDS if message.get(key)), None)
    return message if thinking is None else {**message, "reasoning_content": thinking, "thinking": thinking}


def _common_length(first: str, second: str) -> int:
    """Return the number of characters at the start that are the same."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def _template_error(messages: Sequence[Message], where: str, error: Exception) -> DatasetError:
    from jinja2 import TemplateError

    roles = [f"{message.get('role')!s:.80}" for message in messages]
    reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    reason = " ".join(reason[:_MAX_REASON].split())
    return DatasetError(f"{where}: the chat template refuses this conversation (roles {roles}): {reason}")


def _limit_error(tokenizer: Any, where: str, error: TemplateLimitError) -> TokenizerError:
    folder = Path(str(getattr(tokenizer, "name_or_path", "")))
    file = next((folder / name for name in _TEMPLATE_FILES if (folder / name).is_file()), "the tokenizer")
    return TokenizerError(f"{where}: the chat template of {file} is refused: {error}")


def _call_variable(name: str, context: Any, value: object) -> object:
    return context[name](value)


@lru_cache(maxsize=16)
def _instrumented(source: str) -> tuple[Any, bool, bool]:
    """Return a compiled template with probes, and whether it has `{% generation %}` marks, outside and inside macros.

    A probe at the start of a loop's body reports the loop's item; the one after a loop reports its end. Loops inside
    macros and other buffered blocks have no probe. A `{% generation %}` block becomes two probes around its content.
    """
    import jinja2
    from jinja2 import nodes

    environment = new_sandbox()
    for name in (_ITEM, _PLACE):
        environment.filters[name] = jinja2.pass_context(partial(_call_variable, name))
    tree = environment.parse(source)
    collected = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock)
    marks = hidden_marks = False

    def report(function: str, item: nodes.Expr) -> nodes.Node:
        return nodes.Output([nodes.Filter(item, function, [], [], None, None)])

    def place(name: str) -> nodes.Node:
        return report(_PLACE, nodes.Const(name))

    def instrument(body: list[nodes.Node]) -> list[nodes.Node]:
        nonlocal marks, hidden_marks
        result: list[nodes.Node] = []
        for node in body:
            if isinstance(node, nodes.CallBlock) and _is_generation(node):
                marks = True
                result += [place("generation"), *instrument(node.body), place("end")]
                continue
            result.append(node)
            if isinstance(node, collected):
                hidden_marks |= any(map(_is_generation, node.find_all(nodes.CallBlock)))
                continue
            for name in ("body", "elif_", "else_"):
                if isinstance(getattr(node, name, None), list):
                    setattr(node, name, instrument(getattr(node, name)))
            if isinstance(node, nodes.For) and isinstance(node.target, nodes.Name):
                node.body.insert(0, report(_ITEM, nodes.Name(node.target.name, "load")))
                result[-1:] = [place("loop"), node, place("end of loop")]
        return result

    tree.body = instrument(tree.body)
    code: Any = environment.compile(tree)
    return LimitedTemplate.from_code(environment, code, environment.make_globals(None)), marks, hidden_marks


def _is_generation(node: Any) -> bool:
    from jinja2 import nodes

    function = node.call.node
    return isinstance(function, nodes.ExtensionAttribute) and function.name == "_generation_support"


def _message_spans(reports: Sequence[Report], count: int) -> tuple[Span, ...] | None:
    """Return the characters of every message; None if no loop over messages emits text, or two do for a message."""
    spans: list[Span | None] = [None] * count
    current: list[int | None] = [None]  # message of every open loop, the innermost last
    position = 0
    for item, now in reports:
        message = next((index for index in reversed(current) if index is not None), None)
        if message is not None and now > position:
            start, end = spans[message] or (position, position)
            if end != position:
                return None
            spans[message] = (start, now)
        position = now
        if item == "loop":
            current.append(None)
        elif item == "end of loop":
            current.pop()
        elif isinstance(item, int):
            current[-1] = None if item < 0 else item
    if not any(spans):
        return None
    result, position = [], 0
    for span in spans:
        result.append(span or (position, position))
        position = result[-1][1]
    return tuple(result)


def _marked_spans(reports: Sequence[Report]) -> tuple[Span, ...]:
    marks = [position for item, position in reports if item in ("generation", "end")]
    return tuple(zip(marks[::2], marks[1::2], strict=True))
