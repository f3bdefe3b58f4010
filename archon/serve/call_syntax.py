"""Syntax of tool calls in the formats of the model families, including the deviations that models often write.

A `…_calls` function parses a text that consists only of calls. It raises ValueError for any other text, which then
stays text: a call with guessed arguments would be worse.
"""

from __future__ import annotations

import ast
import json
import math
import re
import secrets
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A function that the model calls. `arguments` is a JSON object, as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}", compare=False)


Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of the tools' parameters, by name."""

CallSyntax = Callable[[str, Schemas], list[ToolCall]]


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite_float(number: str) -> float:
    if math.isinf(value := float(number)):
        raise ValueError(f"{number:.20} is too large a number")
    return value


def load_json(text: str | bytes) -> Any:
    """Parse JSON strictly: raises ValueError for NaN, Infinity, numbers that overflow, and too deep nesting."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float)
    except RecursionError:
        raise ValueError("nested too deeply") from None


# Models write line breaks inside strings, which JSON forbids.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite_float, strict=False)
_SEPARATOR = re.compile(r"\s*(?:[;,]\s*)?")
_TOKEN = re.compile(
    r"""(?P<other>\s+|[{}\[\]:,;]|-?\d[\d.eE+-]*)|(?P<word>[A-Za-z]+)"""
    r"""|"(?P<double>(?:[^"\\]|\\.)*)"|'(?P<single>(?:[^'\\]|\\.)*)'""",
    re.DOTALL,
)
_QUOTE = re.compile(r'\\.|"', re.DOTALL)
_CLOSED_STRINGS = re.compile(r"""(?:[^"']++|"(?:[^"\\]++|\\.)*+"|'(?:[^'\\]++|\\.)*+')*+""", re.DOTALL)
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def load_values(text: str) -> list[Any]:
    """Parse JSON or Python literals, joined by white space, `,` or `;`; raises ValueError unless there is one."""
    try:
        return _load_joined(text)
    except ValueError:
        return _load_joined(_python_to_json(text))


def _load_joined(text: str) -> list[Any]:
    values: list[Any] = []
    end = len(text) - len(text.lstrip())
    while end < len(text) or not values:
        try:
            value, end = _DECODER.raw_decode(text, end)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        values.append(value)
        separator = _SEPARATOR.match(text, end)
        assert separator is not None
        end = separator.end()
    return values


def _python_to_json(text: str) -> str:
    r"""Rewrite Python literals as JSON: `True`, `None`, single quotes and `\'`. A malformed literal stays malformed."""
    pieces, end = [], 0
    for token in _TOKEN.finditer(text):
        if token.start() != end:
            break
        end, kind = token.end(), token.lastgroup
        if kind in ("single", "double"):
            string = _QUOTE.sub(lambda quote: {r"\'": "'", '"': r"\""}.get(quote[0], quote[0]), token[kind])
            pieces.append(f'"{string}"')
        else:
            pieces.append(_PYTHON_WORDS.get(token[0], token[0]))
    if end != len(text):
        raise ValueError(f"no literal at character {end}")
    return "".join(pieces)


def make_call(name: Any, arguments: Any) -> ToolCall:
    """Return a call; `arguments` is an object, such an object as text, or None or blank for no arguments.

    Raises:
        ValueError: there is no name, or the arguments are not an object of JSON.
    """
    if isinstance(arguments, str) and arguments.strip():
        (arguments, *more) = load_values(arguments)
        if more:
            raise ValueError("more than one object of arguments")
    elif arguments is None or isinstance(arguments, str):
        arguments = {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("no name, or no object of arguments")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # raises ValueError for half a surrogate pair
    return ToolCall(name, text)


_ARGUMENTS = ("arguments", "parameters")
_CALL_KEYS = {"name", "type", "id", "function", *_ARGUMENTS}


def _object_call(value: Any) -> ToolCall:
    """Return the call of `{"name": …, "arguments": {…}}`, or of the same object below `function`."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        raise ValueError("no object with a name")
    arguments = [value[key] for key in _ARGUMENTS if value.get(key) is not None]
    if len(arguments) > 1 or (not arguments and not value.keys() <= _CALL_KEYS):
        raise ValueError("it is not clear which are the arguments")
    return make_call(value.get("name", value.get("function")), arguments[0] if arguments else None)


def json_calls(body: str, schemas: Schemas) -> list[ToolCall]:
    """Parse `{"name": …, "arguments": {…}}` (Hermes, Qwen2.5, Qwen3), several, or a list of them."""
    values = load_values(body)
    return [_object_call(item) for value in values for item in (value if isinstance(value, list) else [value])]


def in_json_string(body: str) -> bool:
    """Return whether a text ends inside a string of JSON or Python."""
    return _CLOSED_STRINGS.fullmatch(body) is None


def schema_types(schema: Any) -> set[str]:
    """Return the types that a JSON schema allows; none if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type")
    types = {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}
    if schema.get("nullable") is True:
        types.add("null")
    for name in ("anyOf", "oneOf", "allOf"):
        options = schema.get(name)
        types = types.union(*map(schema_types, options)) if isinstance(options, list) else types
    if not types and isinstance(schema.get("enum"), list):
        types = {_json_type(value) for value in schema["enum"]}
    return types


def _json_type(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    return {float: "number", str: "string", list: "array", dict: "object"}[type(value)]


def parse_argument(text: str, schema: Any) -> Any:
    """Parse an argument that is written as bare text, by the types of its JSON schema.

    A text that is no value of these types is returned as it is, and so is any text without a schema.
    """
    types = schema_types(schema)
    if not types - {"string"}:
        return text
    try:
        (value,) = load_values(text)
    except ValueError:
        return text
    kind = _json_type(value)
    if kind == "integer" and types & {"integer", "number"}:
        return int(value) if "integer" in types else value
    # Models write null for an optional argument, although its schema often does not allow it.
    return value if kind in types or (value is None and "string" not in types) else text


def _properties(schemas: Schemas, tool: str) -> Mapping[str, Any]:
    properties = schemas.get(tool, {}).get("properties", {})
    return properties if isinstance(properties, Mapping) else {}


def _typed_call(name: str, pattern: re.Pattern[str], text: str, schemas: Schemas) -> ToolCall:
    """Return a call with arguments that are written as bare text: `text` consists of matches of a name and a value."""
    arguments: dict[str, Any] = {}
    properties, end = _properties(schemas, name), 0
    while argument := pattern.match(text, end):
        key, end = argument[1].strip(), argument.end()
        if key in arguments:
            raise ValueError("an argument occurs twice")
        arguments[key] = parse_argument(argument[2], properties.get(key))
    if text[end:].strip():
        raise ValueError("text between the arguments")
    return make_call(name, arguments)


_FUNCTION = re.compile(r"<function=([^<>\n]+)>")
_NEXT_FUNCTION = re.compile(r"(?<=</function>)\s*(?=<function=[^<>\\n]+>)")


def qwen3_coder_calls(body: str, schemas: Schemas) -> list[ToolCall]:
    """Parse `<function=NAME><parameter=KEY>VALUE</parameter>…</function>` (Qwen3-Coder, Qwen3.5), one or several.

    A value may contain tags, even `</parameter>`. Models forget this tag before `</function>` and before the tool's
    next parameter, and `</function>` itself.
    """
    calls = []
    body = body.strip()
    for text in _NEXT_FUNCTION.split(body) if body.startswith("<function=") else [body]:
        function = _FUNCTION.match(text)
        if function is None or in_parameter(text):
            raise ValueError("no function")
        name, parameters = function[1].strip(), text[function.end() :].removesuffix("</function>")
        names = "|".join(map(re.escape, _properties(schemas, name))) or r"(?!)"
        parameter = re.compile(
            r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?"
            rf"(?:</parameter>(?=\s*(?:<parameter=|\Z))|(?=<parameter=(?:{names})>)|\Z)",
            re.DOTALL,
        )
        calls.append(_typed_call(name, parameter, parameters, schemas))
    return calls


def in_parameter(body: str) -> bool:
    """Return whether a text ends inside a parameter of `qwen3_coder_calls`."""
    return not body.rstrip().endswith("</function>") and body.rfind("<parameter=") > body.rfind("</parameter>")


_ARGUMENT = re.compile(
    r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL
)


def glm_calls(body: str, schemas: Schemas) -> list[ToolCall]:
    """Parse `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…` (GLM-4.5 and later)."""
    head, mark, remaining = body.partition("<arg_key>")
    name, remaining = head.strip(), mark + remaining
    if re.search(r"[\s<>]", name) or (not mark and name not in schemas):
        raise ValueError("no function")
    return [_typed_call(name, _ARGUMENT, remaining, schemas)]


def in_argument(body: str) -> bool:
    """Return whether a text ends inside an argument of `glm_calls`."""
    return body.rfind("<arg_value>") > body.rfind("</arg_value>")


DEEPSEEK = {name: f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")}
_DEEPSEEK_CALL = re.compile(rf"\s*{DEEPSEEK['call▁begin']}(.*?){DEEPSEEK['sep']}(.*?){DEEPSEEK['call▁end']}", re.DOTALL)
_DEEPSEEK_FENCED = re.compile(r"(\S+)\s*```json\s*(.*?)\s*```\s*", re.DOTALL)


def deepseek_calls(body: str, schemas: Schemas) -> list[ToolCall]:
    """Parse the calls of DeepSeek-V3 and R1, and of V3.1.

    V3 and R1 write `function`, a separator, the name and fenced JSON; V3.1 writes the name, a separator and JSON. Each
    call has separate marks.
    """
    matches = _DEEPSEEK_CALL.findall(body)
    if not matches or _DEEPSEEK_CALL.sub("", body).strip():
        raise ValueError("no calls")
    calls = []
    for first, second in matches:
        fenced = _DEEPSEEK_FENCED.fullmatch(second) if first.strip() == "function" else None
        name, arguments = (fenced[1], fenced[2]) if fenced is not None else (first.strip(), second)
        calls.append(make_call(name, arguments))
    return calls


PYTHON_TAG = "<|python_tag|>"


def llama3_calls(body: str, schemas: Schemas) -> list[ToolCall]:
    """Parse the calls of Llama 3.1 to 3.3.

    They are `{"name": …, "parameters": {…}}`, several with `;` between them, or calls in Python:
    `name.call(key="value")` for built-in tools, and `[name(key="value"), …]`. Without `<|python_tag|>`, JSON with a
    name may be an answer: a call without arguments then has to name a tool.
    """
    text = body.replace(PYTHON_TAG, " ")
    try:
        calls = json_calls(text, schemas)
    except ValueError:
        calls = python_calls(text, schemas)
    if text == body and any(call.arguments == "{}" and call.name not in schemas for call in calls):
        raise ValueError("not the name of a tool")
    return calls


def python_calls(body: str, schemas: Schemas) -> list[ToolCall]:
    """Parse `name.call(key="value")`, or `name(key="value")` of a tool; one, or a list of them."""
    try:
        parsed = ast.parse(body.strip(), mode="eval").body
        return [_python_call(call, schemas) for call in (parsed.elts if isinstance(parsed, ast.List) else [parsed])]
    except (SyntaxError, TypeError, MemoryError, RecursionError):
        raise ValueError("no call") from None


def _python_call(call: ast.expr, schemas: Schemas) -> ToolCall:
    match call:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="call"), args=[], keywords=keywords):
            pass
        case ast.Call(func=function, args=[], keywords=keywords) if (name := ast.unparse(function)) in schemas:
            pass
        case _:
            raise ValueError("no call")
    if not all(word.arg for word in keywords):
        raise ValueError("arguments without names")
    return make_call(name, {str(word.arg): ast.literal_eval(word.value) for word in keywords})


TOOL_CALLS = "[TOOL_CALLS]"
_MISTRAL_NAMED = re.compile(r"\s*([^\s\[\]{}]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)


def mistral_calls(body: str, schemas: Schemas) -> list[ToolCall]:
    """Parse `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and the later `[TOOL_CALLS]NAME[ARGS]{…}`, repeated.

    Ids have nine letters and digits, as Mistral's templates demand of the calls that they render.
    """
    before, *texts = body.split(TOOL_CALLS)
    if before.strip():
        raise ValueError("text before the calls")
    calls: list[ToolCall] = []
    for text in texts:
        named = _MISTRAL_NAMED.fullmatch(text)
        calls += json_calls(text, schemas) if named is None else [make_call(named[1], named[2])]
    return [ToolCall(call.name, call.arguments, secrets.token_hex(5)[:9]) for call in calls]


def valid_calls(syntax: CallSyntax, body: str, schemas: Schemas) -> list[ToolCall]:
    """Return the calls of a text; none unless it consists only of valid calls."""
    try:
        return syntax(body, schemas)
    except (ValueError, RecursionError):
        return []
