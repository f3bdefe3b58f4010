"""A twin of vLLM whose answers are replaced by hostile ones; its pushes and scores are real."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from copy import deepcopy
from typing import Any

from aiohttp import web

from tests.remote.twin import VLLMTwin

Choice = dict[str, Any]
Change = Callable[[Choice], Any]
"""Changes a choice in place, or returns the whole response instead."""
Send = Callable[[web.Request], Awaitable[web.StreamResponse]]

GENERATE = "/inference/v1/generate"
HUGE = 10**400
LIMIT, STOP = 4, 2
"""Tokens that a small run asks for, and the id that ends its answers."""
JSON = {"content_type": "application/json"}


class HostileTwin(VLLMTwin):
    """`change` replaces the fields of answers, and `send` their HTTP responses."""

    change: Change | None = None
    send: Send | None = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        response = await super()._handle(request)
        if request.path != GENERATE or not isinstance(response, web.Response) or response.status != 200:
            return response
        answer = json.loads(response.text or "")
        if "seed" not in (await request.json())["sampling_params"]:  # a score, or the first request of a connection
            return response
        if self.send is not None:
            return await self.send(request)
        if self.change is not None:
            changed = self.change(answer["choices"][0])
            return web.json_response(answer if changed is None else changed)
        return response


def answer(tokens: list[Any], reason: Any = "length", logprobs: list[Any] | None = None) -> Change:
    """Replace tokens, logprobs and spans by ones that agree with each other."""

    def change(choice: Choice) -> None:
        content = zip(tokens, logprobs or [-1.0] * len(tokens), strict=True)
        choice["token_ids"], choice["finish_reason"] = tokens, reason
        choice["logprobs"] = {"content": [{"token_id": token, "logprob": logprob} for token, logprob in content]}
        choice["weight_versions"] = [choice["weight_versions"][0] | {"start": 0, "end": len(tokens)}]

    return change


def put(value: Any, *path: str | int) -> Change:
    """Put `value` at a path of a complete answer."""

    def change(choice: Choice) -> None:
        answer([3] * LIMIT)(choice)
        place: Any = choice
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = deepcopy(value)

    return change


def spans(*ends: tuple[Any, Any]) -> Change:
    def change(choice: Choice) -> None:
        answer([3] * LIMIT)(choice)
        version = choice["weight_versions"][0]["version"]
        choice["weight_versions"] = [{"version": version, "start": start, "end": end} for start, end in ends]

    return change


def respond(body: bytes | str, status: int = 200, **options: Any) -> Send:
    async def send(request: web.Request) -> web.StreamResponse:
        options_ = options or JSON
        data = body.encode() if isinstance(body, str) else body
        return web.Response(body=data, status=status, **options_)

    return send


async def truncated(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    assert request.transport is not None
    request.transport.close()
    return response


async def endless(request: web.Request) -> web.StreamResponse:
    """Chunks of a megabyte until the client leaves."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    while True:
        await response.write(b" " * 2**20)


async def dripping(request: web.Request) -> web.StreamResponse:
    """A byte ten times a second, which no time-out of a read notices."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.1)


BOMB = gzip.compress(b" " * 2**26)
NOT_FINITE = "expected a logprob: a finite number, at most 0"
LOGPROB = ("logprobs", "content", 2, "logprob")

CHANGES: dict[str, tuple[Change, str]] = {
    "no tokens": (answer([], "stop"), "finish_reason = 'stop'; expected stop only after a stop token"),
    "float id": (put(1.0, "token_ids", 1), r"token_ids.1 = 1.0; expected a token id from 0 to 14"),
    "boolean id": (put(True, "token_ids", 0), "token_ids.0 = True"),
    "null id": (put(None, "token_ids", 0), "token_ids.0 = None"),
    "negative id": (put(-1, "token_ids", 3), "token_ids.3 = -1"),
    "id of 400 digits": (put(HUGE, "token_ids", 0), r"token_ids.0 = 1000.*\.\.\."),
    "ids as text": (put("3333", "token_ids"), "token_ids = '3333'; expected a list"),
    "too many ids": (answer([3] * (LIMIT + 1)), "expected at most 4 tokens, got 5"),
    "one logprob less": (put([{"token_id": 3, "logprob": -1}] * 3, "logprobs", "content"), "4 logprobs, got 3"),
    "other ids": (put(4, "logprobs", "content", 1, "token_id"), r"content.\*.token_id = \[3, 4, 3, 3\]; expected the"),
    "NaN": (put(float("nan"), *LOGPROB), f"logprob.2 = nan; {NOT_FINITE}"),
    "infinity": (put(float("-inf"), *LOGPROB), f"logprob.2 = -inf; {NOT_FINITE}"),
    "boolean logprob": (put(True, *LOGPROB), NOT_FINITE),
    "positive logprob": (put(0.5, *LOGPROB), f"logprob.2 = 0.5; {NOT_FINITE}"),
    "logprob as text": (put("-1", *LOGPROB), NOT_FINITE),
    "null logprob": (put(None, *LOGPROB), NOT_FINITE),
    "logprob of 400 digits": (put(-HUGE, *LOGPROB), NOT_FINITE),
    "content of numbers": (put([1, 2, 3, 4], "logprobs", "content"), "content.0 = 1; expected an object"),
    "end 10**12": (spans((0, 10**12)), "weight_versions.0.end = 1000000000000; expected an integer from 1 to 4"),
    "gap": (spans((0, 1), (2, 4)), "weight_versions.1.start = 2; expected an integer from 1 to 1"),
    "overlap": (spans((0, 3), (2, 4)), "weight_versions.1.start = 2"),
    "uncovered": (spans((0, 3)), "expected spans that cover all 4 tokens, got 3"),
    "end true": (spans((0, 1), (1, True)), "weight_versions.1.end = True"),
    "version as list": (put([0], "weight_versions", 0, "version"), r"version = \[0\]; expected a string"),
    "spans as number": (put(7, "weight_versions"), "weight_versions = 7; expected a list"),
    "unknown version": (put("7", "weight_versions", 0, "version"), "weights of version '7'"),
    "unknown reason": (put("error", "finish_reason"), "finish_reason = 'error'; expected one of stop, length, abort"),
    "reason as list": (put(["stop"], "finish_reason"), "finish_reason = .*; expected one of"),
    "no reason": (put(None, "finish_reason"), "without choices.0.finish_reason"),
    "no choices": (lambda choice: {"choices": []}, "without choices.0"),
    "a list": (lambda choice: [[[]]], "without choices.0"),
    "a number": (lambda choice: 5, "without choices.0"),
    "after a stop token": (answer([3, STOP, 3, 3]), "token_ids.1 = 2; expected no token after this stop token, got 2"),
    "stop without stop token": (
        answer([3, 4], "stop"),
        r"stop only after a stop token, but the 2 tokens end with \[4\]",
    ),
    "early length": (answer([3, 4]), "expected length only after 4 tokens, got 2"),
    "abort of a complete answer": (answer([3, STOP], "abort"), "expected stop or length"),
    "endless abort": (answer([], "abort"), "ended a request 9 times with abort, without a push"),
}

RESPONSES: dict[str, tuple[Send, str]] = {
    "deep JSON": (respond("[" * 10**5 + "]" * 10**5), "nested too deeply"),
    "no UTF-8": (respond(b'{"choices": "\xff"}'), "did not answer with JSON"),
    "no JSON": (respond('{"choices": ['), "did not answer with JSON, but with"),
    "a page": (respond("{}", content_type="text/html"), "Content-Type text/html; expected application/json"),
    "redirect": (respond("", 302, headers={"Location": "file:///etc/passwd"}), "status 302"),
    "error with control characters": (respond("a\r\n\x1b[31mb", 500), r"status 500: a \[31mb$"),
    "bad request": (respond("no", 400), "status 400: no"),
    "wrong key": (respond("no", 401), "status 401"),
    "no content": (respond("", 204), "did not answer with JSON, but with ''"),
    "gzip bomb": (respond(BOMB, headers={"Content-Encoding": "gzip"}, **JSON), "Content-Encoding gzip; expected none"),
    "huge": (respond(b" " * 2**24), r"more than 42\d{5} bytes, the limit"),
    "endless": (endless, "bytes, the limit of this response"),
    "truncated": (truncated, "cannot be reached"),
}
