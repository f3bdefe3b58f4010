"""OpenAI endpoints that answer with anything: one line each, within the limits of bytes and time."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from aiohttp import web

from archon.rl.answers import Answer, EndpointAnswerer
from archon.rl.endpoint import Endpoint
from archon.schema.errors import RolloutError
from tests.remote.hostile import BOMB, JSON, Send, dripping, endless, respond, truncated
from tests.tolerances import SOON_SECONDS


async def serving(send: Send) -> tuple[web.AppRunner, str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", send)
    runner = web.AppRunner(app, shutdown_timeout=0.0, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"


@pytest.mark.parametrize(
    ("send", "message"),
    [
        (respond("[" * 10**5 + "]" * 10**5), "nested too deeply"),
        (respond(b"\xff"), "did not answer with JSON"),
        (respond("<html>", content_type="text/html"), "did not answer with JSON, but with '<html>'"),
        (respond("", 302, headers={"Location": "file:///etc/passwd"}), "302"),
        (respond("a\n" * 10**5, 400), "Error code: 400"),
        (respond(BOMB, headers={"Content-Encoding": "gzip"}, **JSON), "Content-Encoding gzip; expected none"),
        (respond(b" " * 2**24), "more than 4202496 bytes"),
        (endless, "more than 4202496 bytes"),
        (dripping, "did not answer within 0.5 s"),
        (truncated, "incomplete|closed|peer"),
    ],
    ids=["deep", "no text", "page", "redirect", "error", "bomb", "huge", "endless", "dripping", "truncated"],
)
def test_a_response_beyond_the_limits_is_one_line(send: Send, message: str) -> None:
    async def run() -> None:
        runner, url = await serving(send)
        endpoint = Endpoint(url, url, retries=0, seconds=0.5 if send is dripping else 30.0)
        started = time.monotonic()
        try:
            with pytest.raises(RolloutError, match=message) as error:
                await endpoint.complete(4, model="m", prompt="p")
            assert time.monotonic() - started < SOON_SECONDS
            text = str(error.value)
            assert text.startswith(url) and "\n" not in text and len(text) < 600
        finally:
            await endpoint.close()
            await runner.cleanup()

    asyncio.run(run())


CHAT = {"messages": [{"role": "user", "content": "1+1="}]}
CHOICE = {"finish_reason": "stop", "text": "2"}


@pytest.mark.parametrize(
    ("row", "body", "message"),
    [
        ({"prompt": "p"}, {"choices": [CHOICE], "usage": {"completion_tokens": 1}}, None),
        (CHAT, {"choices": [CHOICE | {"message": {"content": "2"}}]}, None),
        ({"prompt": "p"}, {"choices": []}, "without choices.0.text"),
        ({"prompt": "p"}, "text", "without choices.0.text"),
        ({"prompt": "p"}, {"choices": [CHOICE | {"text": 2}]}, "choices.0.text = 2; expected a string"),
        ({"prompt": "p"}, {"choices": [CHOICE | {"text": "\ud800"}]}, "without unpaired surrogates"),
        ({"prompt": "p"}, {"choices": [CHOICE | {"finish_reason": ["x"]}]}, r"finish_reason = \['x'\]"),
        ({"prompt": "p"}, {"choices": [CHOICE], "usage": {"completion_tokens": -1}}, "completion_tokens = -1"),
        (CHAT, {"choices": [CHOICE | {"message": {"content": [2]}}]}, r"content = \[2\]; expected a string"),
    ],
)
def test_fields_of_an_answer_are_checked(row: dict[str, Any], body: Any, message: str | None) -> None:
    async def run() -> Answer:
        runner, url = await serving(respond(json.dumps(body)))
        try:
            return await EndpointAnswerer(url, "m", {"max_tokens": 4}, 1).answer(row, None)
        finally:
            await runner.cleanup()

    if message is None:
        answer = asyncio.run(run())
        assert (answer.text, answer.stop_reason) == ("2", "stop")
    else:
        with pytest.raises(RolloutError, match=message):
            asyncio.run(run())
