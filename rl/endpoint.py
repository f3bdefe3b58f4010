"""Client of OpenAI endpoints. Responses are untrusted: time and bytes are limited, and fields are checked."""

from __future__ import annotations

import asyncio
import importlib
import os
from typing import Any

from archon.remote.answer_checks import Fields
from archon.remote.clients import require_package
from archon.remote.http import MAX_BYTES, one_line, parse_json
from archon.schema.errors import RolloutError

REQUEST_SECONDS = 600.0
"""Limit of a request with its retries, from the first connection to the last byte."""
TOKEN_BYTES = 2048
"""Bytes of a response for each token of prompt and answer, in addition to `MAX_BYTES`: a logprob, and twice a text of
128 characters with 6 bytes each, at most."""


class Endpoint:
    """Client of the endpoint at `url`. The environment variable OPENAI_API_KEY holds its key.

    Args:
        url: base URL, ending in /v1.
        name: beginning of error messages.
        retries: how often a request is sent again if the endpoint fails.
        seconds: limit of a request with its retries.
    """

    def __init__(self, url: str, name: str, retries: int = 3, seconds: float = REQUEST_SECONDS) -> None:
        openai = require_package("openai")
        self._name, self._seconds = name, seconds
        # Redirects could lead into the trainer's own network, and a compressed response is larger than its bytes.
        http = openai.DefaultAsyncHttpxClient(follow_redirects=False, headers={"Accept-Encoding": "identity"})
        transport = importlib.import_module(type(http).__mro__[1].__module__)  # the httpx release that openai uses
        self._errors: tuple[type[Exception], ...] = (openai.OpenAIError, transport.HTTPError, ValueError)
        key = os.environ.get("OPENAI_API_KEY") or "none"  # the client requires one
        self._client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=retries, http_client=http)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def complete(self, n_tokens: int, **options: Any) -> Fields:
        """Request a completion; a chat completion if `options` contains `messages`.

        Args:
            n_tokens: maximum tokens of prompt and answer, for the limit of bytes.
            options: fields of the request.

        Raises:
            RolloutError: the endpoint failed, was late, or did not answer with JSON.
        """
        limit = MAX_BYTES + n_tokens * TOKEN_BYTES
        api = self._client.chat.completions if "messages" in options else self._client.completions
        try:
            async with asyncio.timeout(self._seconds), api.with_streaming_response.create(**options) as response:
                encoding = response.headers.get("Content-Encoding", "identity")
                if encoding.lower() != "identity":
                    raise RolloutError(
                        f"{self._name} answered with Content-Encoding {one_line(encoding)}; expected none"
                    )
                content = bytearray()
                async for chunk in response.iter_bytes():
                    content += chunk
                    if len(content) > limit:
                        raise RolloutError(
                            f"{self._name} answered with more than {limit} bytes, the limit of a response"
                        )
        except RolloutError:
            raise
        except TimeoutError:
            raise RolloutError(f"{self._name} did not answer within {self._seconds:g} s") from None
        except self._errors as error:  # ValueError: a value that JSON cannot hold
            raise RolloutError(f"{self._name}: {one_line(str(error))}") from None
        return Fields(self._name, parse_json(bytes(content), self._name))
