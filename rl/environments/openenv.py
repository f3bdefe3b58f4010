"""OpenEnv: environments behind an HTTP server.

`workflow: openenv:http://127.0.0.1:8000` plays one episode per sample, each in a session of the server's `/ws`
protocol.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from archon.data.environments import EnvironmentName
from archon.remote.answer_checks import Fields
from archon.remote.clients import loop_client, require_package, server_session
from archon.remote.http import Http, ServerError, one_line, parse_json
from archon.rl.environments.episodes import Step, environment_reward
from archon.rl.environments.splits import SIZE, episode_rows
from archon.schema.errors import ConfigError, RolloutError
from archon.schema.urls import require_http_url

SECONDS = 60.0
"""Time limit of a connection, and of one request until its response is complete."""
CLOSE_SECONDS = 5.0
"""Time limit of the end of a session, also if the server sends other messages."""
MESSAGE_BYTES = 16 * 2**20
"""Maximum bytes of one message, checked while it arrives. An observation may hold a screenshot next to its text."""
MAX_FIELDS = 256
"""Maximum fields of an action or observation."""
_RESERVED_FIELDS = (
    "done",
    "reward",
    "metadata",
)  # fields of observations and actions that belong to OpenEnv, not to the environment


def rows(name: EnvironmentName, split: str, seed: int) -> list[dict[str, Any]]:
    """Return rows with the seeds of `size` episodes (500 by default)."""
    _require_url(name)
    name.require_options(["size"], "train_data of an environment (its fields go to workflow)")
    return episode_rows(name, split, seed, name.integer_option("size", SIZE))


def reward(name: EnvironmentName) -> Callable[..., float]:
    """Return the placeholder reward: the server scores episodes."""
    return environment_reward(name.text)


def make_environment(name: EnvironmentName) -> Callable[[], Session]:
    """Return a function that makes a session, with the text fields from the server's schema.

    Raises:
        ConfigError: the server does not respond, or the text field is ambiguous and not set by `action_field` or
            `observation_field`.
    """
    url = _require_url(name)
    name.require_options(["action_field", "observation_field"], "an environment's workflow")
    try:
        schema = Fields(f"{url}/schema", Http(url, sends_key=False).get("/schema"))
        properties = {part: _properties(schema.at(part, "properties")) for part in ("action", "observation")}
    except RolloutError as error:
        raise ConfigError(
            f"{name.text}: {url}/schema is not an OpenEnv schema ({error}); start the server first, and set its base "
            "URL"
        ) from error
    fields = [_text_field(name, part, of_part) for part, of_part in properties.items()]
    return lambda: Session(url, *fields)


class Session:
    """Episode on a server, over one connection."""

    def __init__(self, url: str, action_field: str, observation_field: str) -> None:
        self._url = "ws" + url.removeprefix("http") + "/ws"
        self._action_field, self._observation_field = action_field, observation_field
        self._socket: Any = None

    async def reset(self, seed: int) -> str:
        """Begin the episode of a seed and return the first observation."""
        http = await loop_client(server_session, lambda client: client.closed, lambda client: client.close())
        try:
            async with asyncio.timeout(SECONDS):
                self._socket = await http.ws_connect(self._url, max_msg_size=MESSAGE_BYTES)
        except TimeoutError:
            raise ServerError(f"{self._url} accepted no connection within {SECONDS:g} s") from None
        return self._observation_text(await self._ask("reset", {"seed": seed}))

    async def step(self, action: str) -> Step:
        """Send an action and return its result."""
        answer = await self._ask("step", {self._action_field: action})
        reward = answer.find("reward")
        return Step(
            self._observation_text(answer),
            0.0 if reward is None else reward.number(),
            answer.at("done").boolean(),
        )

    async def close(self) -> None:
        """End the session, if there is one."""
        if self._socket is None:
            return
        try:
            # aiohttp limits the wait for each message, which a server that keeps sending never exceeds.
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._socket.close()
        except TimeoutError:
            pass  # the connection is closed without the server's consent

    def _observation_text(self, answer: Fields) -> str:
        """Return the text field; null, which an optional field may be, stands for no text."""
        observation = answer.at("observation")
        if type(observation.value) is dict and observation.value.get(self._observation_field, "") is None:
            return ""
        return str(observation.at(self._observation_field).value)

    async def _ask(self, kind: str, data: dict[str, Any]) -> Fields:
        """Send a request and return the data of the response.

        Raises:
            ServerError: the response is late, too large, malformed or an error.
        """
        try:
            async with asyncio.timeout(SECONDS):
                await self._socket.send_str(json.dumps({"type": kind, "data": data}))
                received = await self._socket.receive()
        except TimeoutError:
            raise ServerError(f"{self._url} did not answer {kind} within {SECONDS:g} s") from None
        if received.type is not require_package("aiohttp").WSMsgType.TEXT:
            end = one_line(f"{received.type.name} {str(received.data or '')[:200]} {received.extra or ''}")
            raise ServerError(
                f"{self._url} answered {kind} with {end}; expected a text message of at most {MESSAGE_BYTES:,} bytes"
            )
        answer = Fields(self._url, parse_json(received.data.encode(), self._url))
        kind_of_answer, payload = answer.at("type").text(), answer.at("data")
        if kind_of_answer == "observation":
            return payload
        if kind_of_answer != "error":
            raise answer.at("type").wrong("'observation' or 'error'")
        found = (payload.find("message"), payload.find("code"))
        message, code = (None if part is None else one_line(str(part.value)) for part in found)
        advice = ""
        if code == "CAPACITY_REACHED":
            advice = "; set workflow_args.max_concurrent, or the server's max_concurrent_envs"
        raise ServerError(f"{self._url} answered {kind} with the error {message!r} ({code}){advice}")


def _require_url(name: EnvironmentName) -> str:
    if not name.task.startswith(("http://", "https://")):
        raise ConfigError(f"{name.text}: expected the server's base URL, such as openenv:http://127.0.0.1:8000")
    return require_http_url(name.task, name.text).rstrip("/")


def _properties(part: Fields) -> Mapping[str, Any]:
    """Return the fields of an action or observation; their names are sent back and shown, so they are short."""
    if type(part.value) is not dict or len(part.value) > MAX_FIELDS:
        raise part.wrong(f"an object of at most {MAX_FIELDS} fields")
    for field, schema in part.value.items():
        Fields(part.url, field, f"{part.path}, the name of a field").text()
        if type(schema) is not dict:
            raise Fields(part.url, schema, f"{part.path}.{field}").wrong("an object")
    return part.value


def _text_field(name: EnvironmentName, part: str, properties: Mapping[str, Any]) -> str:
    """Return the text field of an action or observation."""
    fields = {field: schema for field, schema in properties.items() if field not in _RESERVED_FIELDS}
    option = f"{part}_field"
    configured = name.options.get(option)
    texts = [field for field, schema in fields.items() if _is_text(schema)]
    if configured is not None and configured in fields:
        return str(configured)
    if configured is None and len(texts) == 1:
        return texts[0]
    problem = f"an {part} has {len(texts)} text fields, expected 1"
    if configured is not None:
        problem = f"an {part} has no field {configured!r}"
    raise ConfigError(
        f"{name.text}: {problem}; choose from {', '.join(fields) or 'none'}: openenv:{name.task}?{option}=NAME"
    )


def _is_text(schema: Mapping[str, Any]) -> bool:
    choices = schema.get("anyOf")
    kinds = [schema, *(choices if isinstance(choices, list) else [])]
    return any(isinstance(kind, dict) and kind.get("type") == "string" for kind in kinds)
