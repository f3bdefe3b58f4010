"""Sandbox of chat templates: a template comes with a checkpoint, so its time, memory and output are bounded.

The limits hold while a template runs. Loops, calls and filters count steps. Operations that can make a value longer
than their operands compute its size first. A container counts everything inside it, so that nested references
(`[x, x]`, forty times) cannot print more than they hold.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import compiler, nodes
from jinja2.filters import FILTERS, do_join, make_attrgetter
from jinja2.runtime import markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, generate_lorem_ipsum
from markupsafe import Markup

from archon.schema.errors import TokenizerError

MAX_SOURCE = 2**18
"""Maximum characters of a template; the longest of released models have about 20,000."""
MAX_TEXT = 2**24
"""Maximum characters of one value, and of the rendered conversation: 16 times the text of 256k tokens."""
MAX_PRODUCED = 2**27
"""Maximum characters of all values that one rendering makes: eight of the longest."""
MAX_STEPS = 2**23
"""Maximum iterations, calls, operators and filters of one rendering: 1 to 3 seconds."""
MAX_SECONDS = 10.0
"""Maximum time to render a template. It is checked between steps, so a step that has begun is finished."""
MAX_BITS = 2**14
"""Maximum bits of an integer product or power."""
_SLOT = 8  # bytes of a reference; a character counts 1
_STEP, _TEXT, _PARTS = "archon_step", "archon_text", "archon_parts"
_CODECS = frozenset({"utf-8", "utf8", "ascii", "latin-1", "latin1", "utf-16", "utf-32"})  # idna takes quadratic time


class TemplateLimitError(TokenizerError):
    """Chat template that exceeds a limit of time, memory or output."""


class Budget:
    """Steps, characters and time that one rendering has left."""

    def __init__(self) -> None:
        self.steps, self.produced = 0, 0
        self.builds = False  # whether the template has made a container, which may hold a value several times
        self.end = time.monotonic() + MAX_SECONDS
        self._sizes: dict[int, tuple[Any, int]] = {}  # by id, with the value, so that the id stays its own

    def step(self) -> None:
        """Count a step; raises `TemplateLimitError` after the last."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TemplateLimitError(f"it takes more than {MAX_STEPS:,} steps; simplify its loops or macros")
        if time.monotonic() > self.end:
            raise TemplateLimitError(f"it takes more than {MAX_SECONDS:g} s; simplify its loops or macros")

    def check(self, size: int) -> None:
        """Raise `TemplateLimitError` if a value of this size is too long, before it exists."""
        if size > MAX_TEXT:
            raise TemplateLimitError(f"it makes a value longer than {MAX_TEXT:,} characters; shorten its output")

    def add(self, size: int) -> None:
        """Count a new value, of this size at most."""
        self.produced += size
        if size > MAX_TEXT:
            self.check(size)
        if self.produced > MAX_PRODUCED:
            raise TemplateLimitError(
                f"it makes values of more than {MAX_PRODUCED:,} characters in total; simplify its loops or macros"
            )

    def size(self, value: Any) -> int:
        """Return the characters of a value with everything inside it."""
        if isinstance(value, str | bytes):
            return len(value)
        if not isinstance(value, list | tuple | dict):
            return max(_SLOT, value.bit_length() // 3) if isinstance(value, int) else _SLOT
        if not self.builds:
            return _SLOT * len(value)  # of the conversation
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        total = _SLOT
        for item in (part for pair in value.items() for part in pair) if isinstance(value, dict) else value:
            if isinstance(item, Namespace):
                raise TemplateLimitError("it puts a namespace into a list or a mapping; put in the values themselves")
            total += _SLOT + self.size(item)
            self.check(total)
        self._sizes[id(value)] = (value, total)
        return total


_BUDGET: ContextVar[Budget] = ContextVar("budget")


def _budget() -> Budget:
    """Return the budget of this rendering; a new one where constants are folded, outside a rendering."""
    return _BUDGET.get(None) or Budget()


def _count(value: Any, budget: Budget) -> None:
    if isinstance(value, list | tuple | dict):
        budget.builds = True
        budget.add(budget.size(value))
    elif isinstance(value, str | bytes):
        budget.add(len(value))


def _text_size(value: Any, budget: Budget) -> int:
    """Return the characters of `str(value)`, at most."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Namespace):
        raise TemplateLimitError("it prints a namespace; print its values")
    return budget.size(value)


class LimitedTemplate(jinja2.Template):
    """Template with a budget for each rendering."""

    def render(self, *args: Any, **kwargs: Any) -> str:
        """Return the text."""
        token = _BUDGET.set(Budget())
        try:
            return super().render(*args, **kwargs)
        finally:
            _BUDGET.reset(token)

    def generate(self, *args: Any, **kwargs: Any) -> Iterator[str]:
        """Yield the text in pieces."""
        _BUDGET.set(Budget())
        return _bounded_chunks(super().generate(*args, **kwargs))


def _bounded_chunks(chunks: Iterable[str]) -> Iterator[str]:
    budget, total = _budget(), 0
    for chunk in chunks:
        total += len(chunk)
        budget.check(total)
        yield chunk


class _Generator(compiler.CodeGenerator):
    """Compiler whose code counts the sizes of values that `~`, slices, lists and dictionaries create."""

    def _output_child_pre(self, node: nodes.Expr, frame: Any, finalize: Any) -> None:
        super()._output_child_pre(node, frame, finalize)
        self.write("environment.printed(" if frame.buffer is None else "environment.collected(")

    def _output_child_post(self, node: nodes.Expr, frame: Any, finalize: Any) -> None:
        self.write(")")
        super()._output_child_post(node, frame, finalize)

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:  # noqa: N802
        self.write("environment.join_texts((")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write(f"), {'context.eval_ctx.autoescape' if frame.eval_ctx.volatile else frame.eval_ctx.autoescape})")

    def visit_Getitem(self, node: nodes.Getitem, frame: Any) -> None:  # noqa: N802
        is_slice = isinstance(node.arg, nodes.Slice)
        self.write("environment.sliced(" if is_slice else "")
        super().visit_Getitem(node, frame)
        self.write(")" if is_slice else "")

    def visit_List(self, node: nodes.List, frame: Any) -> None:  # noqa: N802
        self._literal(super().visit_List, node, frame, node.items)

    def visit_Tuple(self, node: nodes.Tuple, frame: Any) -> None:  # noqa: N802
        self._literal(super().visit_Tuple, node, frame, node.items if node.ctx == "load" else [])

    def visit_Dict(self, node: nodes.Dict, frame: Any) -> None:  # noqa: N802
        self._literal(super().visit_Dict, node, frame, [part for pair in node.items for part in (pair.key, pair.value)])

    def _literal(self, visit: Callable[..., None], node: Any, frame: Any, items: list[Any]) -> None:
        counted = any(not isinstance(item, nodes.Const) for item in items)
        self.write("environment.count(" if counted else "")
        visit(node, frame)
        self.write(")" if counted else "")


class Sandbox(ImmutableSandboxedEnvironment):
    """Sandbox with limits, and a fast path for fields of messages, which take 3/4 of the time of long conversations."""

    code_generator_class = _Generator
    template_class = LimitedTemplate
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, source: jinja2.Environment) -> None:
        extensions = [type(extension) for extension in source.extensions.values()]
        super().__init__(
            trim_blocks=source.trim_blocks,
            lstrip_blocks=source.lstrip_blocks,
            extensions=extensions,
        )
        self.globals |= source.globals | {"lipsum": _lipsum}
        self.filters |= {name: _bounded_filter(name, function) for name, function in source.filters.items()}
        self.filters |= {"join": _join, _STEP: _step, _TEXT: _text}
        tests: dict[str, Any] = self.tests  # jinja2 declares their values as `function`
        for name in ("in", "eq", "==", "equalto", "ne", "!=", "lt", "<", "le", "<=", "gt", ">", "ge", ">="):
            tests[name] = _counted(tests[name])

    @staticmethod
    def concat(chunks: Iterable[str]) -> str:
        """Return the text of a template."""
        return "".join(_bounded_chunks(chunks))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MAX_SOURCE:
            raise TemplateLimitError(f"it has {len(source):,} characters; expected at most {MAX_SOURCE:,}")
        return super()._parse(source, name, filename)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Compile a template with a step in each iteration, and with texts counted where they are collected."""
        for loop in list(source.find_all(nodes.For)):
            loop.body.insert(0, nodes.ExprStmt(_hook(_STEP, True)))
            if loop.test is not None:
                loop.test = nodes.And(_hook(_STEP, True), loop.test)
        collected = (nodes.Macro, nodes.CallBlock, nodes.FilterBlock, nodes.AssignBlock, nodes.Block, nodes.For)
        for block in list(source.find_all(collected)):
            if isinstance(block, nodes.For) and not block.recursive:
                continue
            for output in block.find_all(nodes.Output):
                output.nodes = [
                    _hook(_TEXT, part.data) if isinstance(part, nodes.TemplateData) else part for part in output.nodes
                ]
        node: Any  # jinja2 declares no attribute as optional
        for node in source.find_all(nodes.Node):
            if node.lineno is None:
                node.set_lineno(1)
            if node.environment is None:
                node.set_environment(self)
        return super()._generate(source, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return a field or an attribute."""
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may use an attribute."""
        key = type(obj), attr  # the result depends only on these
        if key not in _SAFE:
            _SAFE[key] = super().is_safe_attribute(obj, attr, value)
        return _SAFE[key]

    def printed(self, value: Any) -> Any:
        """Check the size of a value that is printed. `concat` counts the printed strings."""
        if type(value) is not str:
            budget = _budget()
            budget.check(_text_size(value, budget))
        return value

    def collected(self, value: Any) -> Any:
        """Count a piece of a macro's text."""
        budget = _budget()
        budget.add(len(value) if type(value) is str else _text_size(value, budget))
        return value

    def sliced(self, value: Any) -> Any:
        """Count a part of a value."""
        if isinstance(value, str | bytes | list | tuple):
            budget = _budget()
            budget.add(budget.size(value))
        return value

    def count(self, value: Any) -> Any:
        """Count a new value."""
        _count(value, _budget())
        return value

    def join_texts(self, parts: tuple[Any, ...], autoescape: bool) -> str:
        """Return the value of `~`."""
        budget = _budget()
        budget.add(sum([len(part) if type(part) is str else _text_size(part, budget) for part in parts]))
        return markup_join(parts) if autoescape else str_join(parts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Return the value of an operator."""
        budget = _BUDGET.get(None) or Budget()
        if operator == "+" and type(left) is str and type(right) is str:
            budget.add(len(left) + len(right))
            return left + right
        if isinstance(left, int) and isinstance(right, int):
            if operator == "*":
                _check_bits(left.bit_length() + right.bit_length())
            elif operator == "**":
                _check_bits(left.bit_length() * abs(right))
        elif operator == "+" and isinstance(left, str | bytes | list | tuple):
            budget.builds |= isinstance(left, list | tuple)
            budget.add(budget.size(left) + budget.size(right))
        elif operator == "*" and isinstance(left, int):
            budget.builds |= isinstance(right, list | tuple)
            budget.add(max(0, left) * budget.size(right))
        elif operator == "*" and isinstance(right, int):
            budget.builds |= isinstance(left, list | tuple)
            budget.add(max(0, right) * budget.size(left))
        elif operator == "%" and isinstance(left, str | bytes):
            values = right if isinstance(right, tuple) else (right,)
            budget.add(_format_size(left, values, budget))
        return self.binop_table[operator](left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a safe and bounded `str.format`."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text, checked = value.__self__, wrapped

        @functools.wraps(checked)
        def bounded(*args: Any, **kwargs: Any) -> str:
            budget = _budget()
            budget.check(_format_size(text, (*args, *kwargs.values()), budget))
            return checked(*args, **kwargs)

        return bounded

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, PYI063 (as in jinja2)
        """Call a method, a macro or a function."""
        budget = _budget()
        budget.step()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int):
            size = _METHOD_SIZES.get(__obj.__name__)
            if __obj.__name__ == "join" and args:
                args = ([*args[0]],)  # an iterator is read once
            if size is not None:
                named = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
                budget.check(size(budget, owner, *args, **named))
        result = super().call(__context, __obj, *args, **kwargs)
        _count(result, budget)
        return result


_SAFE: dict[tuple[type, str], bool] = {}
_DICT_ATTRIBUTES = frozenset(dir(dict))


def _hook(name: str, value: object) -> nodes.Filter:
    return nodes.Filter(nodes.Const(value), name, [], [], None, None)


@jinja2.pass_context  # so that it is not folded into a constant
def _step(context: Any, value: bool) -> bool:
    _BUDGET.get().step()
    return value


@jinja2.pass_context
def _text(context: Any, text: str) -> str:
    """Return a template's own text as an expression, which `_count_output` counts."""
    return Markup(text) if context.eval_ctx.autoescape else text


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any) -> Any:
        _budget().step()
        return function(*args)

    return counted


def _lipsum(n: int = 5, html: bool = True, min: int = 20, max: int = 100) -> str:
    _budget().check(n * max * 20)
    return generate_lorem_ipsum(n, html, min, max)


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateLimitError(f"it computes an integer of {bits:,} bits; expected at most {MAX_BITS:,}")


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if name in _SMALL_FILTERS:
        return function
    first = int(hasattr(function, "jinja_pass_arg"))  # after the context, the evaluation context or the environment
    estimate = _FILTER_SIZES.get(name)

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        budget = _budget()
        budget.step()
        if estimate is not None:
            budget.check(estimate(budget, *args[first:], **kwargs))
        result = function(*args, **kwargs)
        _count(result, budget)
        return result

    return bounded


@jinja2.pass_eval_context
def _join(eval_ctx: Any, value: Any, d: Any = "", attribute: Any = None) -> str:
    """Join items; an iterator is read once, to know their size."""
    budget = _budget()
    budget.step()
    items = list(value if attribute is None else map(make_attrgetter(eval_ctx.environment, attribute), value))
    budget.add(sum(_text_size(item, budget) for item in items) + len(items) * _text_size(d, budget))
    return do_join(eval_ctx, items, d)


_NUMBER = re.compile(r"\d+")


def _format_size(text: str | bytes, values: Iterable[Any], budget: Budget) -> int:
    """Return the characters of a text with formatted values, at most: each place may have the longest of them."""
    form = text.decode("latin-1") if isinstance(text, bytes) else str(text)
    widths = sum(int(number[:10]) for number in _NUMBER.findall(form))
    places = form.count("%") + form.count("{")
    flat = [item for value in values for item in (value.values() if isinstance(value, Mapping) else (value,))]
    longest = max((_text_size(value, budget) for value in flat), default=0)
    if "*" in form or "{" in form:  # a value may be a width
        longest += max((abs(value) for value in flat if isinstance(value, int)), default=0) if "*" in form else 0
        longest += max((value for value in flat if isinstance(value, int)), default=0) if ":{" in form else 0
    return len(form) + widths + places * longest


def _replaced(budget: Budget, text: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    text, old = (text, old) if isinstance(text, bytes) else (str(text), str(old))
    return len(text) + text.count(old) * _text_size(new, budget)


def _padded(budget: Budget, text: Any, width: int = 80, *_: Any) -> int:
    return max(_text_size(text, budget), width)


def _coded(budget: Budget, text: Any, encoding: str = "utf-8", *_: Any, **__: Any) -> int:
    if str(encoding).lower() not in _CODECS:
        raise TemplateLimitError(f"it uses the codec {encoding!r:.40}; expected one of {', '.join(sorted(_CODECS))}")
    return 4 * len(text)


def _translated(budget: Budget, text: Any, table: Any, *_: Any, **__: Any) -> int:
    values = table.values() if isinstance(table, Mapping) else ()
    return len(text) * max((len(value) for value in values if isinstance(value, str)), default=1)


def _indented(budget: Budget, text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    text = str(text)
    return len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(width))


def _as_json(budget: Budget, value: Any, _escaped: Any = False, indent: Any = None, *_: Any, **__: Any) -> int:
    """Return the characters of JSON; with an indent, each item has a line, indented by its depth."""
    size = budget.size(value)
    width = len(indent) if isinstance(indent, str) else indent or 0
    pending = [(value, 1)] if width else []
    while pending and size <= MAX_TEXT:
        item, depth = pending.pop()
        size += _SLOT + width * depth
        children = item.values() if isinstance(item, dict) else item if isinstance(item, list | tuple) else ()
        pending += [(child, depth + 1) for child in children]
    return size


def _summed(budget: Budget, value: Any, attribute: Any = None, start: Any = 0) -> int:
    """Return the size of a sum; sums of lists copy them once for each item."""
    return len(value) * budget.size(value) if isinstance(start, list | tuple) and hasattr(value, "__len__") else 0


# Size of a result, at most, by the name of a method of str, bytes or int; other methods return no more than they read.
_METHOD_SIZES: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
    "expandtabs": lambda budget, text, tabsize=8: len(text) * max(1, tabsize),
    "replace": _replaced,
    "join": lambda budget, text, items: sum(map(budget.size, items)) + len(items) * len(text),
    "translate": _translated,
    "encode": _coded,
    "decode": _coded,
    "to_bytes": lambda budget, number, length=1, *_, **__: length,
}
# Filters that return one of their arguments or items, a number, or an iterator.
_SMALL_FILTERS = frozenset(
    {"abs", "attr", "count", "d", "default", "first", "float", "items", "last", "length", "map", "max", "min"}
    | {"random", "reject", "rejectattr", "select", "selectattr"}
)
# Size of the result of other filters, as above.
_FILTER_SIZES: dict[str, Callable[..., int]] = {
    "center": _padded,
    "indent": _indented,
    "replace": _replaced,
    "format": lambda budget, text, *args, **kwargs: _format_size(str(text), (*args, *kwargs.values()), budget),
    "wordwrap": lambda budget, text, _width=79, _break=True, wrapstring=None, *_, **__: (
        len(text) * (1 + len(wrapstring or "\n"))
    ),
    "batch": lambda budget, value, linecount, *_, **__: linecount * _SLOT,
    "slice": lambda budget, value, slices, *_, **__: slices * _SLOT,
    "round": lambda budget, value, precision=0, method="common": abs(precision) * 2**10,  # of 10**precision
    "sum": _summed,
    "tojson": _as_json,
    "string": lambda budget, value: _text_size(value, budget),
    "pprint": lambda budget, value: _text_size(value, budget),
    "urlize": lambda budget, text, _limit=None, _nofollow=False, target=None, rel=None, *_, **__: (
        len(str(text)) * (8 + len(target or "") + len(rel or ""))
    ),
}


def new_sandbox() -> Sandbox:
    """Return an environment of chat templates: transformers' filters and functions, with limits."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    sandbox = Sandbox(_compile_jinja_template("").environment)
    sandbox.filters.pop(_PARTS, None)  # a template that renders a template would begin with a new budget
    return sandbox


_SANDBOX = functools.lru_cache(maxsize=1)(new_sandbox)


@functools.lru_cache(maxsize=128)
def _compile(source: str) -> jinja2.Template:
    return _SANDBOX().from_string(source)


@jinja2.pass_context  # so that it is not folded into a constant
def _parts(context: Any, source: str) -> list[tuple[str, bool]]:
    """Render a chat template with limits; return its text in parts, and which are marked with `{% generation %}`."""
    template, outer = _compile(source), context.environment.globals
    environment: Any = template.environment
    variables = {name: value for name, value in context.get_all().items() if outer.get(name, context) is not value}
    blocks: list[str] = []
    spans: list[tuple[int, int]] = []
    with environment.activate_tracker(blocks, spans) if "generation" in source else nullcontext():
        for block in template.generate(**variables):
            blocks.append(block)
    text, parts, position = "".join(blocks), [], 0
    for start, end in spans:
        parts += [(text[position:start], False), (text[start:end], True)]
        position = end
    return [*parts, (text[position:], False)]


@functools.lru_cache(maxsize=128)
def _bounded_source(source: str) -> str:
    """Return a template that renders `source` with limits.

    transformers compiles and renders the returned template in its own environment, with its own variables. The template
    contains `source` as a string, because transformers searches the text of a template for some words.
    """
    FILTERS[_PARTS] = _parts  # new environments have it
    text = source.encode("unicode_escape").decode().replace("'", "\\'")
    return (
        f"{{% for text, marked in '{text}' | {_PARTS} %}}{{% if marked %}}{{% generation %}}{{{{ text }}}}"
        "{% endgeneration %}{% else %}{{ text }}{% endif %}{% endfor %}"
    )


def bounded_chat_template(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method `apply_chat_template` of a tokenizer, with limits on what the template does.

    Only tokenizers of transformers run templates; the method of another object is returned as it is.
    """
    if not hasattr(getattr(method, "__self__", None), "get_chat_template"):
        return method
    return functools.partial(_apply, method)


def _apply(
    method: Any,
    conversation: Any,
    tools: Any = None,
    documents: Any = None,
    chat_template: str | None = None,
    *args: Any,
    **options: Any,
) -> Any:
    source = method.__self__.get_chat_template(chat_template, tools)
    return method(conversation, tools, documents, _bounded_source(source), *args, **options)
