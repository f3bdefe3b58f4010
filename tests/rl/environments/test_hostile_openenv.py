"""OpenEnv servers that break the protocol: one line, and the cost of one sample, never of its group or of the run."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import WSCloseCode, web

from archon.rl import GenerationHyperparameters
from archon.rl.environments import openenv
from archon.rl.environments.episodes import EnvironmentWorkflow, Step
from archon.rl.episode_context import EpisodeContext, workflow_context
from archon.rl.workflows import resolve_workflow
from archon.schema.errors import ConfigError
from tests.serve.scripted import Scripted

GCONFIG = GenerationHyperparameters(n_samples=2, max_new_tokens=8)
SCHEMA: Any = {
    part: {"properties": {name: {"type": "string"}}} for part, name in (("action", "say"), ("observation", "text"))
}
GOOD: dict[str, Any] = {"observation": {"text": "Go."}, "reward": 0.5, "done": True}

Answer = Callable[[web.WebSocketResponse], Awaitable[Any]]


def text(value: str) -> Answer:
    return lambda socket: socket.send_str(value)


def data(value: Any) -> Answer:
    return text(json.dumps({"type": "observation", "data": value}))


def put(**fields: Any) -> Answer:
    return data(GOOD | fields)


def without(field: str) -> Answer:
    return data({key: value for key, value in GOOD.items() if key != field})


async def fragments(socket: web.WebSocketResponse) -> None:
    """Parts of a message that never ends."""
    writer = socket._writer
    assert writer is not None
    while True:
        writer.transport.write(b"\x01\x7e\x80\x00" + b"a" * 2**15)
        await asyncio.sleep(0)


async def announced(socket: web.WebSocketResponse) -> None:
    """A frame of 2^62 bytes of which none arrive."""
    assert socket._writer is not None
    socket._writer.transport.write(b"\x81\x7f" + (2**62).to_bytes(8, "big"))
    await asyncio.sleep(60)


async def raw(socket: web.WebSocketResponse) -> None:
    assert socket._writer is not None
    socket._writer.transport.write(bytes(range(256)))
    await asyncio.sleep(60)


async def cut(socket: web.WebSocketResponse) -> None:
    assert socket._writer is not None
    socket._writer.transport.abort()


async def pings(socket: web.WebSocketResponse) -> None:
    while True:
        await socket.ping(b"x")
        await asyncio.sleep(0.01)


async def flood(socket: web.WebSocketResponse) -> None:
    """A valid end of the episode, then messages until the client leaves, also while it closes."""
    await put(done="no")(socket)
    while True:
        await data(GOOD)(socket)
        await asyncio.sleep(0.01)


HOSTILE: dict[str, tuple[Answer, str]] = {
    "not JSON": (text("{"), "did not answer with JSON"),
    "nothing": (text(""), "did not answer with JSON"),
    "nesting": (text("[" * 100_000), "nested too deeply"),
    "digits": (text('{"type": "observation", "data": ' + "9" * 5000 + "}"), "did not answer with JSON"),
    "list": (text("[1]"), "answered without type"),
    "null": (text("null"), "answered without type"),
    "type of a number": (text('{"type": 3, "data": {}}'), "type = 3; expected a string"),
    "another type": (text('{"type": "state", "data": {}}'), "type = 'state'; expected 'observation' or 'error'"),
    "no data": (text('{"type": "observation"}'), "answered without data"),
    "data of a list": (data([GOOD]), "answered without data.observation"),
    "no observation": (without("observation"), "answered without data.observation"),
    "observation of a number": (put(observation=3), "answered without data.observation.text"),
    "another field": (put(observation={"texts": "Go."}), "answered without data.observation.text"),
    "half of a pair": (put(observation={"text": "\ud800"}), "half of a surrogate pair at character 0"),
    "long text": (put(observation={"text": "a" * (2**20 + 1)}), "of 1,048,577 characters; expected at most 1,048,576"),
    "NaN": (put(reward=float("nan")), "data.reward = nan; expected a finite number"),
    "infinity": (put(reward=float("-inf")), "data.reward = -inf; expected a finite number"),
    "huge integer": (put(reward=10**400), "expected a finite number"),
    "huge reward": (put(reward=1e39), "returned the reward 1e+39 (float); expected a finite number of at most 1e+30"),
    "reward of a string": (put(reward="1.0"), "data.reward = '1.0'; expected a finite number"),
    "reward of a list": (put(reward=[1.0]), "data.reward = [1.0]; expected a finite number"),
    "done of a string": (put(done="false"), "data.done = 'false'; expected true or false"),
    "done of a number": (put(done=1), "data.done = 1; expected true or false"),
    "no done": (without("done"), "answered without data.done"),
    "long error": (
        text(json.dumps({"type": "error", "data": {"message": "no\n" * 10**5, "code": {"a": 1}}})),
        "answered step with the error 'no no no",
    ),
    "error of a string": (text('{"type": "error", "data": "no"}'), "answered step with the error None (None)"),
    "bytes": (lambda socket: socket.send_bytes(b"{}"), "answered step with BINARY"),
    "bytes that are no text": (raw, "answered step with"),
    "close": (
        lambda socket: socket.close(code=WSCloseCode.GOING_AWAY, message=b"bye"),
        "answered step with CLOSE 1001 bye",
    ),
    "cut": (cut, "answered step with CLOSED"),
    "a large message": (text(" " * (2**24 + 1)), "expected a text message of at most 16,777,216 bytes"),
    "fragments": (fragments, "expected a text message of at most 16,777,216 bytes"),
    "announced bytes": (announced, "expected a text message of at most 16,777,216 bytes"),
    "silence": (lambda socket: asyncio.sleep(60), "did not answer step within 0.5 s"),
    "pings": (pings, "did not answer step within 0.5 s"),
    "flood": (flood, "data.done = 'no'"),
}


class Server:
    """A server of valid episodes of one step, but for the first session, whose answers to `kind` are hostile."""

    schema = SCHEMA

    def __init__(self, answer: Answer, kind: str = "step") -> None:
        self._answer, self._kind, self._sessions = answer, kind, itertools.count()

    async def __aenter__(self) -> str:
        app = web.Application()
        app.add_routes([web.get("/ws", self._play), web.get("/schema", self._schema)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"openenv:http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _schema(self, request: web.Request) -> web.Response:
        return web.json_response(self.schema)

    async def _play(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        is_hostile = next(self._sessions) == 0
        async for message in socket:
            kind = json.loads(message.data)["type"]
            await (self._answer if is_hostile and kind == self._kind else data(GOOD))(socket)
        return socket


def played(answer: Answer, kind: str, speaker: Any) -> tuple[Any, EpisodeContext]:
    """Play a group of two samples, the first against the hostile session."""
    context = EpisodeContext(seed=3)

    async def episode() -> Any:
        workflow_context.enter(context)
        async with Server(answer, kind) as environment:
            workflow = await asyncio.to_thread(resolve_workflow, environment, gconfig=GCONFIG, tokenizer=speaker)
            return await workflow.arun_episode(Scripted(speaker, ["a", "b"]), {"seed": 0})

    return asyncio.run(episode()), context


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "step") for name in HOSTILE), *((name, "reset") for name in ("nesting", "cut", "long text"))],
)
def test_a_hostile_answer_costs_one_sample(name: str, kind: str, speaker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, expected = HOSTILE[name]
    for limit in ("SECONDS", "CLOSE_SECONDS"):
        monkeypatch.setattr(openenv, limit, 0.5 if name in ("silence", "pings", "flood") else 5.0)
    start = time.monotonic()
    group, context = played(answer, kind, speaker)
    assert time.monotonic() - start < 4
    assert group["rewards"].tolist() == [0.5] and context.drops == {"environment_failed": 1}
    message = str(context.first_errors["environment_failed"])
    assert expected.replace("step", kind) in message and "\n" not in message and len(message) < 800, message


@pytest.mark.parametrize(
    ("fields", "reward"),
    [({"reward": None}, 0.0), ({"reward": True}, 1.0), ({"reward": 2}, 2.0), ({"observation": {"text": None}}, 0.5)],
)
def test_what_the_protocol_allows_is_played(fields: dict[str, Any], reward: float, speaker: Any) -> None:
    group, context = played(put(**fields), "step", speaker)
    assert sorted(group["rewards"].tolist()) == sorted([reward, 0.5]) and not context.drops


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ([], "answered without action.properties"),
        ({"action": 3}, "answered without action.properties"),
        ({"action": {"properties": ["say"]}}, r"sent action.properties = \['say'\]; expected an object"),
        ({"action": {"properties": {"say": "string"}}}, "sent action.properties.say = 'string'; expected an object"),
        ({"action": {"properties": {"s" * 300: {}}}}, "expected a string of at most 200 printable characters"),
        ({"action": {"properties": {str(n): {} for n in range(300)}}}, "expected an object of at most 256 fields"),
        ({"action": {"properties": {"say": {"anyOf": {"type": "string"}}}}}, "an action has 0 text fields"),
    ],
)
def test_a_hostile_schema_is_one_line(
    schema: Any, expected: str, speaker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "schema", {**SCHEMA, **schema} if isinstance(schema, dict) else schema)
    with pytest.raises(ConfigError, match=expected) as caught:
        played(data(GOOD), "step", speaker)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


class Game:
    """An environment whose first instance returns `results` from `reset` or `step`."""

    made = 0

    def __init__(self, first: Any, step: Any) -> None:
        Game.made += 1
        self._first, self._step = (first, step) if Game.made == 1 else ("Go.", Step("", 0.5, True))

    def reset(self, seed: int) -> Any:
        return self._first

    def step(self, action: str) -> Any:
        return self._step


@pytest.mark.parametrize(
    ("first", "step", "expected"),
    [
        ("Go.", None, "returned a NoneType from its step; expected (observation, reward, done)"),
        ("Go.", ("", 1.0), "returned a tuple from its step"),
        ("Go.", ("", float("nan"), True), "returned the reward nan (float); expected a finite number"),
        ("Go.", ("", 10**5000, True), "returned the reward nan (int)"),
        ("Go.", ("", "much", True), "returned the reward nan (str)"),
        ("Go.", ("\udc80", 1.0, False), "half of a surrogate pair at character 0"),
        ("a" * (2**20 + 1), None, "returned an observation of 1,048,577 characters"),
        ("\udc80", None, "half of a surrogate pair at character 0"),
    ],
)
def test_invalid_values_of_any_environment_cost_one_sample(first: Any, step: Any, expected: str, speaker: Any) -> None:
    context = EpisodeContext(seed=3)
    Game.made = 0

    async def episode() -> Any:
        workflow_context.enter(context)
        workflow = EnvironmentWorkflow(GCONFIG, speaker, lambda: Game(first, step))
        return await workflow.arun_episode(Scripted(speaker, ["a", "b"]), {"seed": 0})

    group = asyncio.run(episode())
    assert group["rewards"].tolist() == [0.5] and context.drops == {"environment_failed": 1}
    assert expected in str(context.first_errors["environment_failed"])
