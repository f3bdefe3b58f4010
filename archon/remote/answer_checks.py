"""Checks of the responses of inference servers. A wrong field is a failure of its server.

`Fields` reads a response, and `check_answer` accepts the answer to a request: nothing of it is used before.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

import numpy as np

from archon.generation.types import GenerationHyperparameters
from archon.remote.http import ServerError

LOGPROB_TOLERANCE = 1e-3
"""Maximum logprob. Rounding can move the logprob of a certain token above 0: by 1e-5 in float32 with logits of 100, and
by less than this limit if a log-softmax over bfloat16 logits is computed in float32."""
MAX_NAME = 200
"""Maximum characters of a version, a release or a dtype."""
MAX_PATH = 4096
"""Maximum characters of a model name, which may be a path."""
MAX_COUNT = 2**31 - 1

AnswerReason = Literal["stop", "length", "abort"]
_REASONS: tuple[AnswerReason, ...] = ("stop", "length", "abort")

# The header that numpy.save writes for three dimensions. NumPy's own reader would allocate the claimed size before it
# reads any data.
_NPY = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<|][iu][1248])', 'fortran_order': (True|False), "
    rb"'shape': \((\d{1,9}), (\d{1,9}), (\d{1,9})\), \} *\n",
    re.DOTALL,
)

_SURROGATES = frozenset(map(chr, range(0xD800, 0xE000)))

_short = reprlib.Repr()
_short.maxlevel, _short.maxlist, _short.maxdict, _short.maxstring, _short.maxlong, _short.maxother = 2, 4, 3, 40, 30, 40


@dataclass(frozen=True)
class Fields:
    """A JSON value of a response. Every method raises ServerError with server, field, value and expectation.

    Attributes:
        url: the server.
        value: the value.
        path: its place in the response.
    """

    url: str
    value: Any
    path: str = ""

    def wrong(self, expected: str) -> ServerError:
        """Return the error of a value that is not `expected`."""
        return ServerError(
            f"{self.url} sent {self.path or 'a response'} = {_short.repr(self.value)}; expected {expected}"
        )

    def at(self, *path: str | int) -> Fields:
        """Return the value at a path of keys and indices."""
        found = self.find(*path)
        if found is None:
            raise ServerError(f"{self.url} answered without {self._join(*path)}")
        return found

    def find(self, *path: str | int) -> Fields | None:
        """Return the value at a path; None if it is missing or null."""
        value = self.value
        for key in path:
            is_there = (isinstance(key, str) and isinstance(value, dict) and key in value) or (
                isinstance(key, int) and isinstance(value, list) and key < len(value)
            )
            if not is_there:
                return None
            value = value[key]
        return None if value is None else Fields(self.url, value, self._join(*path))

    def _join(self, *path: str | int) -> str:
        return ".".join(filter(None, (self.path, *map(str, path))))

    def empty(self, *path: str | int) -> Fields:
        """Return an empty list that stands for a missing or null value at `path`."""
        return Fields(self.url, [], self._join(*path))

    def items(self) -> list[Any]:
        """Return a list."""
        if type(self.value) is not list:
            raise self.wrong("a list")
        return self.value

    def column(self, key: str | int) -> Fields:
        """Return the list of the values at `key` of each item."""
        items, kind = self.items(), dict if isinstance(key, str) else list
        values, get = [], itemgetter(key)
        for index, item in enumerate(items):
            if type(item) is not kind:
                raise Fields(self.url, item, self._join(index)).wrong("an object" if kind is dict else "a list")
            try:
                values.append(get(item))
            except LookupError:
                raise ServerError(f"{self.url} answered without {self._join(index, key)}") from None
        return Fields(self.url, values, self._join("*", key))

    def text(self) -> str:
        """Return a string of at most `MAX_NAME` printable characters."""
        return self._text(MAX_NAME)

    def _text(self, limit: int) -> str:
        if type(self.value) is not str or len(self.value) > limit or not self.value.isprintable():
            raise self.wrong(f"a string of at most {limit} printable characters")
        return self.value

    def integer(self, low: int = 0, high: int = MAX_COUNT) -> int:
        """Return an integer from `low` to `high`; booleans and floats are refused."""
        if type(self.value) is not int or not low <= self.value <= high:
            raise self.wrong(f"an integer from {low} to {high}")
        return self.value

    def number(self) -> float:
        """Return a finite number; a boolean is 0 or 1."""
        if type(self.value) in (bool, int, float) and -1e308 <= self.value <= 1e308:
            return float(self.value)
        raise self.wrong("a finite number")

    def boolean(self) -> bool:
        """Return a boolean."""
        if type(self.value) is not bool:
            raise self.wrong("true or false")
        return self.value

    def content(self) -> str:
        """Return a string. A lone surrogate is refused, because it cannot be written to a file."""
        if type(self.value) is not str or not _SURROGATES.isdisjoint(self.value):
            raise self.wrong("a string without unpaired surrogates")
        return self.value

    def path_text(self) -> str:
        """Return a string of at most `MAX_PATH` printable characters."""
        return self._text(MAX_PATH)

    def version(self) -> str:
        """Return the name of a weight version: a string, or an integer as a string (−1 before the first push)."""
        return str(self.integer(-1, 2**63 - 1)) if type(self.value) is int else self.text()

    def token_ids(self, vocab_size: int = MAX_COUNT) -> list[int]:
        """Return a list of token ids below `vocab_size`."""
        ids = self.items()
        if not {int}.issuperset(map(type, ids)) or (ids and not 0 <= min(ids) <= max(ids) < vocab_size):
            index, wrong = next((i, x) for i, x in enumerate(ids) if type(x) is not int or not 0 <= x < vocab_size)
            raise Fields(self.url, wrong, self._join(index)).wrong(f"a token id from 0 to {vocab_size - 1}")
        return ids

    def logprobs(self, n: int) -> list[float]:
        """Return a list of `n` finite logprobs."""
        values = self.items()
        if len(values) != n:
            raise self.wrong(f"{n} logprobs, got {len(values)}")
        if {float, int}.issuperset(map(type, values)):
            try:
                numbers = list(map(float, values))
            except OverflowError:  # an integer of hundreds of digits
                numbers = [math.inf]
            if all(map(math.isfinite, numbers)) and max(numbers, default=0.0) <= LOGPROB_TOLERANCE:
                return numbers
        index, wrong = next((i, x) for i, x in enumerate(values) if not _is_logprob(x))
        raise Fields(self.url, wrong, self._join(index)).wrong("a logprob: a finite number, at most 0")


def _is_logprob(value: Any) -> bool:
    return type(value) in (float, int) and -1e308 <= value <= LOGPROB_TOLERANCE


@dataclass(frozen=True)
class RawAnswer:
    """Unchecked fields of an answer, as a dialect finds them. Weight versions have one of three forms.

    Attributes:
        tokens: token ids.
        logprobs: logprob of each token.
        reason: why the answer ended.
        logprob_ids: token ids that stand next to the logprobs; None: the dialect has none.
        token_versions: version of each token.
        version: version of all tokens.
        spans: objects with version, start and end.
        experts: routed experts as base64 of a NumPy file; None: not reported.
    """

    tokens: Fields
    logprobs: Fields
    reason: Fields
    logprob_ids: Fields | None = None
    token_versions: Fields | None = None
    version: Fields | None = None
    spans: Fields | None = None
    experts: Fields | None = None


@dataclass
class Answer:
    """A server's answer.

    Attributes:
        tokens: token ids.
        logprobs: logprob of each token.
        stop_reason: why the answer ended.
        versions: (version, first token, last token + 1); empty if the server reports none.
        experts: routed experts of the tokens of prompt and answer, integers [n, L, k] for all L layers or for the MoE
            layers; None if the server does not report them.
    """

    tokens: list[int]
    logprobs: list[float]
    stop_reason: AnswerReason
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    experts: np.ndarray | None = None


@dataclass(frozen=True)
class Expected:
    """Limits that a request sets for its answer.

    Attributes:
        vocab_size: number of token ids.
        limit: maximum number of tokens.
        full: number of tokens at which the server's context is full, `limit` or slightly less.
        stop_token_ids: ids that end the answer and are kept in it.
        gconfig: sampling parameters of the request.
    """

    vocab_size: int
    limit: int
    full: int
    stop_token_ids: Sequence[int]
    gconfig: GenerationHyperparameters


def check_answer(raw: RawAnswer, expected: Expected) -> Answer:
    """Return the answer. Raises ServerError for the first field that is wrong or contradicts another."""
    # 1. Tokens, and one logprob for each.
    tokens = raw.tokens.token_ids(expected.vocab_size)
    n = len(tokens)
    if n > expected.limit:
        raise raw.tokens.wrong(f"at most {expected.limit} tokens, got {n}")
    logprobs = raw.logprobs.logprobs(n)
    if raw.logprob_ids is not None and raw.logprob_ids.token_ids(expected.vocab_size) != tokens:
        raise raw.logprob_ids.wrong(f"the ids of {raw.tokens.path}")
    # 2. One version for each token.
    versions = _versions(raw, n)
    # 3. The stop reason, which must agree with the tokens.
    reason = next((known for known in _REASONS if raw.reason.value == known), None)
    if reason is None:
        raise raw.reason.wrong(f"one of {', '.join(_REASONS)}")
    _check_end(raw, tokens, reason, expected)
    return Answer(tokens, logprobs, reason, versions, None if raw.experts is None else _experts(raw.experts))


def _check_end(raw: RawAnswer, tokens: list[int], reason: AnswerReason, expected: Expected) -> None:
    """Raise ServerError if the tokens and the stop reason contradict each other."""
    n, stops = len(tokens), set(expected.stop_token_ids)
    first = None if stops.isdisjoint(tokens) else next(i for i, token in enumerate(tokens) if token in stops)
    if first is not None and first < n - 1:
        raise Fields(raw.tokens.url, tokens[first], f"{raw.tokens.path}.{first}").wrong(
            f"no token after this stop token, got {n - 1 - first}"
        )
    if reason == "stop" and not (first is not None or (tokens and expected.gconfig.stop)):
        ends = "stop token" if not expected.gconfig.stop else "token"
        raise raw.reason.wrong(f"stop only after a {ends}, but the {n} tokens end with {_short.repr(tokens[-1:])}")
    if reason == "length" and n < expected.full:
        raise raw.reason.wrong(f"length only after {expected.full} tokens, got {n}")
    if reason == "abort" and (first is not None or n == expected.limit):
        raise raw.reason.wrong(f"stop or length, because the {n} tokens are complete")


def _versions(raw: RawAnswer, n: int) -> list[tuple[str, int, int]]:
    """Return spans of versions that cover n tokens exactly; none if the server reports none."""
    if raw.version is not None:
        return [(raw.version.version(), 0, n)]
    spans: list[tuple[str, int, int]] = []
    if raw.token_versions is not None:
        names = raw.token_versions.items()
        if len(names) != n:
            raise raw.token_versions.wrong(f"{n} versions, one a token, got {len(names)}")
        start = 0
        for _, run in groupby(names, key=lambda name: (type(name), str(name) if type(name) in (int, str) else None)):
            values = list(run)
            name = Fields(raw.token_versions.url, values[0], f"{raw.token_versions.path}.{start}").version()
            spans.append((name, start, start + len(values)))
            start += len(values)
        return spans
    if raw.spans is None:
        return spans
    end = 0
    columns = [raw.spans.column(name).items() for name in ("version", "start", "end")]
    for index, (version, first, last) in enumerate(zip(*columns, strict=True)):
        url, path = raw.spans.url, f"{raw.spans.path}.{index}"
        name = Fields(url, version, f"{path}.version").version()
        Fields(url, first, f"{path}.start").integer(end, end)
        end = Fields(url, last, f"{path}.end").integer(min(end + 1, n), n)
        spans.append((name, first, end))
    if end != n and spans:
        raise raw.spans.wrong(f"spans that cover all {n} tokens, got {end}")
    return spans if n else []


def _experts(experts: Fields) -> np.ndarray:
    """Return the array of a NumPy file in base64: integers of three dimensions."""
    wrong = experts.wrong("base64 of a NumPy file with integers of three dimensions")
    if type(experts.value) is not str:
        raise wrong
    try:
        data = base64.b64decode(experts.value, validate=True)
    except (binascii.Error, ValueError):
        raise wrong from None
    header = _NPY.match(data)
    if header is None:
        raise wrong
    dtype, order = np.dtype(header[1].decode()), "F" if header[2] == b"True" else "C"
    shape = tuple(map(int, header.groups()[2:]))
    if math.prod(shape) * dtype.itemsize != len(data) - header.end():
        raise wrong
    array: np.ndarray = np.frombuffer(data, dtype, offset=header.end()).reshape(shape, order=order)  # type: ignore[call-overload]
    return array
