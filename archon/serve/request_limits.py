"""Limits on what a request holds, for every endpoint: checked on its JSON, before fields are validated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from archon.schema.errors import RolloutError

MAX_VALUES = 2**19
"""Maximum values in the JSON of a request, and maximum tokens of its texts together; parsing them takes 0.1 s."""
MAX_OBJECTS = 2**16
"""Maximum JSON objects of a request."""
MAX_PARTS = 2**13
"""Maximum JSON objects of a conversation: messages, their parts and tool calls.

The event loop validates them against the fields of the protocol, which takes 15 µs each.
"""
MAX_DEPTH = 100
"""Maximum nesting of lists and objects; the chat template and JSON schemas walk them recursively."""
MAX_IMAGES = 64
"""Maximum images of a request; their tokens must fit the context as well."""
MAX_LOGPROBS = 2**19
"""Maximum logprobs that the answers of a request may have: tokens times choices times likely tokens at each place."""
MAX_ITEMS: Mapping[str, int] = {
    "messages": 4096,  # each is rendered by the chat template, in up to 0.1 ms
    "input": 4096,
    "tools": 512,  # OpenAI allows 128
    "stop": 64,  # each is searched in the answer after every token
    "stop_sequences": 64,
    "stop_token_ids": 1024,
    "logit_bias": 1024,
    "guided_choice": 1024,
    "prompt": 2**18,  # token ids; the prompts of one request are limited by its answers
    "input_ids": 2**18,
    "betas": 64,
    "include": 64,
    "modalities": 64,
}
"""Maximum items of lists and objects of a request's fields."""
MAX_STOP_CHARACTERS = 1024
"""Maximum characters of a stop string."""
_IMAGE_TYPES = ("image", "image_url", "input_image")


_STRUCTURE = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[{,]', re.DOTALL)
"""Strings, and the characters outside of them that begin a value: a value has at most two."""


class RequestLimitError(RolloutError):
    """A request with more of something than the server accepts."""


def check_body(body: bytes) -> None:
    """Raise `RequestLimitError` for JSON of too many values before it is parsed, which stops every thread."""
    limit = 2 * MAX_VALUES
    if sum(map(body.count, (b"[", b"{", b","))) <= limit:
        return
    count = 0
    for match in _STRUCTURE.finditer(body):
        count += match[0] in (b"[", b"{", b",")
        if count > limit:
            raise RequestLimitError(f"the request has more than {MAX_VALUES:,} values; expected at most that many")


def check_request(body: Mapping[str, Any]) -> int:
    """Return the number of images of a request.

    Raises:
        RequestLimitError: the request exceeds a limit; the message names the field, value and limit.
    """
    for name, limit in MAX_ITEMS.items():
        value = body.get(name)
        if isinstance(value, list | dict) and len(value) > limit:
            raise RequestLimitError(f"{name} has {len(value):,} items; expected at most {limit:,}")
    for name in ("stop", "stop_sequences"):
        value = body.get(name)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and len(text) > MAX_STOP_CHARACTERS:
                raise RequestLimitError(
                    f"{name} has a string of {len(text):,} characters; expected at most {MAX_STOP_CHARACTERS:,}"
                )
    for name in ("messages", "input"):
        parts = _count_objects(body.get(name))
        if parts > MAX_PARTS:
            raise RequestLimitError(f"{name} has {parts:,} objects; expected at most {MAX_PARTS:,}")
    return _count_values(body)


def _count_objects(value: Any) -> int:
    """Return the objects of a value; nesting is limited elsewhere."""
    count, level = 0, [value]
    while level:
        count += sum(isinstance(item, dict) for item in level)
        inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, list | dict))
        level = [item for items in inner for item in items]
    return count


def _count_values(body: Mapping[str, Any]) -> int:
    """Check the values of a request level by level; return the number of images."""
    count = objects = images = depth = 0
    level: list[Any] = [body]
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise RequestLimitError(f"the request is nested deeper than {MAX_DEPTH} levels; flatten it")
        inner: list[Any] = []
        for item in level:
            count += len(item)
            if isinstance(item, dict):
                objects += 1
                images += item.get("type") in _IMAGE_TYPES
                inner += [value for value in item.values() if isinstance(value, list | dict)]
            else:
                inner += [value for value in item if isinstance(value, list | dict)]
        if count > MAX_VALUES:
            raise RequestLimitError(f"the request has more than {MAX_VALUES:,} values; expected at most that many")
        if objects > MAX_OBJECTS:
            raise RequestLimitError(f"the request has more than {MAX_OBJECTS:,} objects; expected at most that many")
        if images > MAX_IMAGES:
            raise RequestLimitError(f"the request has more than {MAX_IMAGES} images; expected at most that many")
        level = inner
    return images
