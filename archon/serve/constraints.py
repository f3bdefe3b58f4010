"""Constrained decoding: grammars of JSON, choices, regular expressions and tool calls, compiled by llguidance.

Grammars are written in llguidance's variant of Lark, https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any

import numpy as np

from archon.checkpoint.chat_template import stop_token_ids
from archon.schema.errors import RolloutError
from archon.serve.call_syntax import Schemas, load_json, schema_types
from archon.serve.token_bytes import TokenBytes
from archon.serve.tool_calls import CallForm

# A space, or a line break with indentation. With unlimited white space a model may write nothing else until the limit.
_WHITESPACE = {"whitespace_pattern": r" |\n[ \t]{0,32}"}
_ANY_TEXT = r"/(.|\n)*/"


def _library() -> Any:
    try:
        import llguidance.numpy
    except ImportError:
        raise RolloutError(
            "constrained answers (response_format, tool_choice) need the package llguidance, which is not installed on "
            "the server; install archon's extra `rl`: pip install 'archon-engine[rl]'"
        ) from None
    return llguidance


def json_grammar(schema: Mapping[str, Any] | str) -> str:
    """Return the grammar of a JSON schema, an object or its JSON text; raise RolloutError if the text is no schema."""
    if isinstance(schema, str):
        try:
            schema = load_json(schema)
        except ValueError as error:
            raise RolloutError(f"the JSON schema is not JSON: {error}") from None
        if not isinstance(schema, dict):
            raise RolloutError(f"the JSON schema is a {type(schema).__name__}; expected an object")
    return f"%json {json.dumps({**schema, 'x-guidance': _WHITESPACE})}"


def regex_grammar(pattern: str) -> str:
    """Return the grammar of texts that fully match a regular expression."""
    return f"/(?:{_library().regex_to_lark(pattern)})/"


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar that accepts exactly these texts."""
    return " | ".join(_quote(choice) for choice in choices)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")  # a control character to llguidance


class AnswerGrammar:
    """Builder of the grammar of one answer: methods add rules, and `write` returns them with the rule `start`.

    Args:
        tokenizer: its special tokens are written as token ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder.items()
        self._special = {token.content: number for number, token in added if token.special}
        self._rules: list[str] = []

    def write(self, start: str) -> str:
        """Return the grammar with the start expression `start`."""
        return "\n".join([f"start: {start}", *self._rules])

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule with a generated name, and return the name."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Return the grammar of one text, with special tokens as token ids, since characters never match them."""
        pieces = re.split(f"({'|'.join(map(re.escape, self._special)) or '(?!)'})", text)
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else _quote(piece) for piece in pieces if piece
        )

    def text_until(self, end: str) -> str:
        """Return the grammar of any text, up to and including the first `end`."""
        if end.startswith(tuple(self._special)):
            return f"{_ANY_TEXT} {self.literal(end)}"
        return self.rule(_ANY_TEXT, f"[suffix={_quote(end)}]")

    def calls(self, form: CallForm, schemas: Schemas, *, single: bool) -> str:
        """Return the grammar of one or more tool calls in the form of a chat template."""
        call = self.rule(" | ".join(self.rule(self._call(form, name, schema)) for name, schema in schemas.items()))
        if not single and form.separator is not None:
            call += f" ({self.literal(form.separator)} {call})*"
        return self.rule(f"{self.literal(form.opening)} {call} {self.literal(form.closing)}")

    def _call(self, form: CallForm, name: str, schema: Mapping[str, Any]) -> str:
        start, end = self.literal(form.before + _quote(name)[1:-1] + form.between), self.literal(form.after)
        if form.parameter is None:
            return f"{start} {json_grammar({**schema, 'type': 'object'})} {end}"
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise RolloutError(f"tool {name!r:.80}: properties is not an object, or required is not a list")
        parameters = []
        for key, value in properties.items():
            before, between, after = form.parameter
            parameter = f"{self.literal(before + key + between)} {self._bare_value(value, schema, after)}"
            parameters.append(parameter if key in required else f"({parameter})?")
        return " ".join([start, *parameters, end])

    def _bare_value(self, value: Any, schema: Mapping[str, Any], after: str) -> str:
        """Return the grammar of an argument that is bare text; JSON if its schema excludes strings."""
        types = schema_types(value)
        if types and "string" not in types:
            definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
            return f"{json_grammar(definitions | value)} {self.literal(after)}"
        options = value.get("enum") if isinstance(value, dict) else None
        if options and all(isinstance(option, str) for option in options):
            return f"({choice_grammar(options)}) {self.literal(after)}"
        return self.text_until(after)


class GrammarConstraint:
    """Position of one answer in a grammar; implements `archon.generation.types.Constraint`."""

    def __init__(self, matcher: Any, n_tokens: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros((1, -(-n_tokens // 32)), dtype=np.int32)

    def copy(self) -> GrammarConstraint:
        """Return an independent constraint in the same state, for another answer."""
        return GrammarConstraint(self._matcher.deep_copy(), 32 * self._mask.shape[1])

    def allowed(self, vocab_size: int) -> np.ndarray:
        """Return a mask of the tokens that may follow, bool [vocab_size]; False for ids that the tokenizer lacks."""
        _library().numpy.fill_next_token_bitmask(self._matcher, self._mask)
        bits = np.unpackbits(self._mask[0].view(np.uint8), bitorder="little", count=vocab_size)
        return bits.astype(bool)

    def accept(self, token: int) -> None:
        """Append a token; raise RolloutError if the grammar does not allow it."""
        at_dead_end = self._matcher.is_stopped() and not self._matcher.is_accepting()
        if at_dead_end or not self._matcher.consume_token(token):
            raise RolloutError(
                "the constraint of the answer (response_format, tool_choice) allows none of the model's tokens here: "
                "it is too complex, cannot be fulfilled, or ends before min_tokens"
            )


class GrammarCompiler:
    """Compiler of grammars for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _tokens(self) -> Any:
        """The tokenizer in llguidance's form; takes a second for a large vocabulary."""
        llguidance, ends = _library(), stop_token_ids(self._tokenizer)
        if not ends:
            raise RolloutError(
                "the tokenizer has no end-of-text token, which a constrained answer must end with; set eos_token"
            )
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer)), eos_token=list(ends))

    def compile(self, grammar: str) -> GrammarConstraint:
        """Compile a grammar into the constraint of one answer.

        Raises:
            RolloutError: the grammar is invalid, too large, or needs something that llguidance does not support.
        """
        llguidance, tokens = _library(), self._tokens
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            # The reason is between the place in the grammar and an excerpt of it.
            reason = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", matcher.get_error())
            reason = re.split(r"\n\s*\d+ \| |\n<non-verbose/>", reason)[0]
            pattern, _, problem = reason.rpartition("\nerror: ")  # after a regular expression of any length
            reason = f"invalid regular expression: {problem}" if pattern else reason
            raise RolloutError(f"the answer cannot be constrained: {' '.join(reason.split())}")
        return GrammarConstraint(matcher, tokens.vocab_size)


class _Vocabulary:
    """Bytes of each token of a tokenizer, in the interface that llguidance expects."""

    def __init__(self, tokenizer: Any) -> None:
        token_bytes = TokenBytes(tokenizer)
        self._encoder = copy(tokenizer.backend_tokenizer)  # private: grammars are compiled in other threads
        self._encoder.no_padding()
        self._encoder.no_truncation()
        self.tokens = [token_bytes(number) for number in range(len(tokenizer))]
        self.special_token_ids = [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]
        self.eos_token_id, self.bos_token_id = stop_token_ids(tokenizer)[0], None

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text within an answer. An empty list makes llguidance search the vocabulary."""
        for before in ("", "\n"):  # SentencePiece adds a space to the start of a text, such as `▁yes` for `yes`
            try:
                ids = self._encoder.encode(before + text.decode(), add_special_tokens=False).ids
            except Exception:  # noqa: BLE001 (tokenizers raises this class for a character without a token)
                return []
            start, n_bytes = len(ids), 0
            while start and n_bytes < len(text):
                start -= 1
                n_bytes += len(self.tokens[ids[start]])
            if b"".join(self.tokens[number] for number in ids[start:]) == text:
                return list(ids[start:])
        return []
