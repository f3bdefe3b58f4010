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
from archon.remote.http import Http
from archon.rl.environments.episodes import Step, environment_reward
from archon.rl.environments.splits import SIZE, episode_rows
from archon.rl.episode_context import workflow_context
from archon.schema.errors import ConfigError, RolloutError
from archon.schema.urls import require_http_url

SECONDS = 60.0
"""Time limit of one server response."""

_FRAME_BYTES = 100 * 2**20
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
        schema = Http(url, sends_key=False).get("/schema")
        properties = {part: schema[part]["properties"] for part in ("action", "observation")}
    except (RolloutError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{name.text}: {url}/schema is not an OpenEnv schema ({type(error).__name__}: {error}); start the server "
            "first, and set its base URL"
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
        async with asyncio.timeout(SECONDS):
            http = await workflow_context.get_aiohttp_session()
            self._socket = await http.ws_connect(self._url, max_msg_size=_FRAME_BYTES)
        return self._observation_text(await self._ask("reset", {"seed": seed}))

    async def step(self, action: str) -> Step:
        """Send an action and return its result."""
        answer = await self._ask("step", {self._action_field: action})
        return Step(self._observation_text(answer), float(answer.get("reward") or 0.0), bool(answer.get("done")))

    async def close(self) -> None:
        """End the session, if there is one."""
        if self._socket is not None:
            await self._socket.close()

    def _observation_text(self, answer: Mapping[str, Any]) -> str:
        return str(answer["observation"].get(self._observation_field, ""))

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the data of the response; raise RuntimeError for a server error."""
        async with asyncio.timeout(SECONDS):
            await self._socket.send_str(json.dumps({"type": kind, "data": data}))
            answer = json.loads(await self._socket.receive_str())
        payload: dict[str, Any] = answer.get("data", {})
        if answer.get("type") != "error":
            return payload
        advice = ""
        if payload.get("code") == "CAPACITY_REACHED":
            advice = "; set workflow_args.max_concurrent, or the server's max_concurrent_envs"
        raise RuntimeError(f"the server says {payload.get('message')!r} ({payload.get('code')}){advice}")


def _require_url(name: EnvironmentName) -> str:
    if not name.task.startswith(("http://", "https://")):
        raise ConfigError(f"{name.text}: expected the server's base URL, such as openenv:http://127.0.0.1:8000")
    return require_http_url(name.task, name.text).rstrip("/")


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
    kinds = [schema, *schema.get("anyOf", [])]
    return any(kind.get("type") == "string" for kind in kinds)
