"""Pictures in requests: OpenAI's and Anthropic's forms, read as the trainer reads them; nothing is fetched."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from PIL import Image

from archon.checkpoint.hf_io import load_model
from archon.checkpoint.tokenizer import load_tokenizer
from archon.data.images import ImageReader
from archon.data.shapes import scenes
from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters
from archon.schema.errors import ImageError
from archon.serve import AgentServer
from tests.small_vision import VISION_MODELS, write_vision_model

PNG = scenes("test")[0][0].image()
OTHER = scenes("test")[1][0].image()


def url_of(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


class VisionServer:
    """A server over a small model that sees, and without one of its parts."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = load_tokenizer(folder)
        self.reader = ImageReader(folder)
        self.engine = InProcessEngine.from_model(load_model(folder), self.tokenizer, max_slots=8, page_size=8)

    def server(self, **options: Any) -> AgentServer:
        gconfig = GenerationHyperparameters(max_new_tokens=6, greedy=True, ignore_eos=True)
        return AgentServer(self.tokenizer, self.engine, gconfig, reader=self.reader, **options)


@pytest.fixture(scope="module", params=VISION_MODELS)
def vision_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionServer:
    return VisionServer(write_vision_model(tmp_path_factory.mktemp("sight"), request.param))


@pytest.fixture
async def post(vision_server: VisionServer) -> AsyncIterator[Any]:
    """Post to the server; returns the response."""
    server = vision_server.server()
    url = await server.start()
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        yield lambda path, **body: client.post(f"{url}/{path}", json={"model": "", **body})
    await server.close()


def chat(*urls: str, text: str = "how many?") -> dict[str, Any]:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]}


def block(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


async def test_every_protocol_sees_the_same_picture(post: Any, vision_server: VisionServer) -> None:
    body = chat(url_of(PNG)) | {"return_token_ids": True, "temperature": 0}
    said = (await post("chat/completions", **body)).json()
    picture = vision_server.reader.read(PNG)
    image = vision_server.reader.image_format
    assert said["prompt_token_ids"].count(image.token) == len(picture.pixel_values) // image.merge_size**2
    wanted = said["choices"][0]["message"]["content"]
    answer = said["choices"][0]["token_ids"]
    scores = vision_server.engine.score_prompt(said["prompt_token_ids"] + answer, images=[picture])
    assert scores.top_tokens[-len(answer) :] == answer  # the most likely after this picture

    parts = [{"type": "input_image", "image_url": url_of(PNG)}, {"type": "input_text", "text": "how many?"}]
    responses = (await post("responses", input=[{"role": "user", "content": parts}], temperature=0)).json()
    assert responses["output"][0]["content"][0]["text"] == wanted
    content = [block(PNG), {"type": "text", "text": "how many?"}]
    messages = [{"role": "user", "content": content}]
    anthropic = (await post("messages", messages=messages, max_tokens=6, temperature=0)).json()
    assert anthropic["content"][0]["text"] == wanted
    counted = (await post("messages/count_tokens", messages=messages)).json()
    assert counted["input_tokens"] == anthropic["usage"]["input_tokens"] == said["usage"]["prompt_tokens"]

    result = [{"type": "tool_result", "tool_use_id": "1", "content": [block(PNG)]}, block(OTHER)]
    several = (await post("messages/count_tokens", messages=[{"role": "user", "content": result}])).json()
    assert several["input_tokens"] > counted["input_tokens"]


@pytest.fixture
def listener() -> Iterator[tuple[str, list[str]]]:
    """A web server with a picture: its URL, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(PNG)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()


async def test_what_cannot_be_seen_is_refused_in_one_line(
    post: Any, vision_server: VisionServer, listener: tuple[str, list[str]]
) -> None:
    file, (web, asked) = io.BytesIO(), listener
    Image.new("RGB", (9000, 9000)).save(file, "PNG")
    for urls, text, problem in (
        ([f"{web}/x.png"], "?", "is not fetched"),
        (["file:///etc/hostname"], "?", "is not fetched"),
        (["/etc/hostname"], "?", "is not fetched"),
        ([url_of(PNG[: len(PNG) // 2])], "?", "truncated"),
        (["data:image/png;base64,###"], "?", "not base64"),
        (["data:text/plain,hello"], "?", "no image in base64"),
        ([url_of(file.getvalue())], "?", "pixels"),
        ([url_of(PNG)], "<|image_pad|>?", "2 image placeholders"),
        ([], "<|image_pad|>?", "1 image placeholders"),
    ):
        response = await post("chat/completions", **chat(*urls, text=text))
        message = response.json()["error"]["message"]
        assert response.status_code == 400
        assert problem in message
        assert "\n" not in message
    source = {"type": "url", "url": f"{web}/x.png"}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    response = await post("messages", max_tokens=4, **body)
    assert response.status_code == 400
    assert "is not fetched" in response.json()["error"]["message"]
    with pytest.raises(ImageError, match="is a URL, which archon never fetches"):
        vision_server.reader.read(f"{web}/x.png")
    assert asked == []

    blind = AgentServer(vision_server.tokenizer, vision_server.engine)
    url = await blind.start()
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        refused = await client.post(f"{url}/chat/completions", json={"model": "", **chat(url_of(PNG))})
    await blind.close()
    assert "this is a text model" in refused.json()["error"]["message"]


async def test_a_session_joins_turns_only_where_the_pictures_are_the_same(vision_server: VisionServer) -> None:
    server = vision_server.server()
    url = await server.start()
    session = server.sessions.open(vision_server.engine, GenerationHyperparameters(max_new_tokens=4, ignore_eos=True))
    headers = {"Authorization": f"Bearer {session.key}"}
    async with httpx.AsyncClient(trust_env=False, timeout=60, headers=headers) as client:
        first = (await client.post(f"{url}/chat/completions", json={"model": "", **chat(url_of(PNG))})).json()
        for data in (PNG, OTHER):
            talk = chat(url_of(data))["messages"]
            talk += [first["choices"][0]["message"], {"role": "user", "content": "why?"}]
            await client.post(f"{url}/chat/completions", json={"model": "", "messages": talk})
        await client.post(f"{url}/sessions/{session.id}/reward", json={"reward": 1.0, "finished": False})
        exported = (await client.get(f"{url}/sessions/{session.id}/export?style=concat")).json()
    await server.close()
    _, same, other = session.interactions
    assert [row["images"] for row in exported["trajectories"]] == [[vision_server.reader.read(OTHER).digest]]
    assert other.parent is None
    assert [each.digest for each in other.response.images] == [vision_server.reader.read(OTHER).digest]
    session.set_reward(1.0)
    for row in session.export("concat"):
        assert [each.digest for each in row.record.images] == [each.digest for each in other.response.images]
    assert same.response.images[0].digest == vision_server.reader.read(PNG).digest
