"""`/health` answers within a second during the largest requests that a server accepts, next to answers in progress."""

from __future__ import annotations

import http.client
import json
import os
import signal
import string
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from archon.engine.engine import ArchonEngine
from archon.rl.bootstrap import write_blank
from archon.schema.config import EngineConfig
from archon.serve.request_limits import MAX_ITEMS, MAX_OBJECTS, MAX_PARTS
from archon.training.config import BootstrapConfig, TokenizerRecipe
from tests.serve.test_images import url_of
from tests.small_vision import VISION_MODELS

HEALTH_SECONDS = 1.0
CONTEXT = 2**15
TOKEN = "secret"
USER = {"role": "user", "content": "hello"}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small vision-language model with a long context, one token a character."""
    base = VISION_MODELS["qwen3_vl"]
    hf_config = base | {"text_config": base["text_config"] | {"max_position_embeddings": CONTEXT}}
    recipe = TokenizerRecipe(alphabet=string.printable[:95] + "\n", images=True)
    path = tmp_path_factory.mktemp("load")
    write_blank(BootstrapConfig(model_type="qwen3_vl", hf_config=hf_config, tokenizer=recipe), path / "blank")
    engine = ArchonEngine(EngineConfig(path=str(path / "blank"), init_from_scratch=True, device="cpu"))
    engine.initialize()
    engine.save(path / "made")
    return path


def only_text(folder: Path) -> dict[str, Any]:
    """Return sampling values without special tokens; a sampled image token would end the answer."""
    added = json.loads((folder / "made" / "tokenizer.json").read_text())["added_tokens"]
    return {"logit_bias": {str(token["id"]): -100 for token in added}, "ignore_eos": True}


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """Base URL of `archon serve` in a process of its own."""
    (folder / "pushes").mkdir()
    command = [sys.executable, "-m", "archon", "serve", str(folder / "made"), "--port", "0", "--token", TOKEN]
    command += ["--push-root", str(folder / "pushes"), "max_slots=8", "device=cpu"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[3]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


@dataclass
class Probe:
    """Seconds of each answer of `/health`, on a connection of its own as a load balancer asks."""

    seconds: list[float] = field(default_factory=list)

    @contextmanager
    def of(self, url: str) -> Iterator[Probe]:
        host, stop = url.removeprefix("http://").removesuffix("/v1"), threading.Event()

        def ask() -> None:
            while not stop.wait(0.02):
                begun = time.perf_counter()
                connection = http.client.HTTPConnection(host, timeout=60)
                connection.request("GET", "/health")
                assert connection.getresponse().status == 200
                connection.close()
                self.seconds.append(time.perf_counter() - begun)

        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask)
            try:
                yield self
            finally:
                stop.set()
            asking.result()


def post(url: str, path: str, body: dict[str, Any] | bytes) -> tuple[int, str]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    with httpx.Client(trust_env=False, timeout=600, headers=headers) as client:
        answer = client.post(f"{url}/{path}", content=content)
    return answer.status_code, answer.text


def talk(key: str, count: int = MAX_ITEMS["messages"]) -> dict[str, Any]:
    """Return a conversation of the most messages, whose text is close to the most that may fit the context."""
    return {key: [{"role": "user", "content": "hello you " * (CONTEXT // 10 * 10 // count + 2)}] * count}


def tools() -> list[dict[str, Any]]:
    """Return the most tools, with almost the most objects."""
    fields = {f"field {number}": {"type": "string"} for number in range(MAX_OBJECTS // 512 - 8)}
    parameters = {"type": "object", "properties": fields}
    return [{"type": "function", "function": {"name": f"tool{n}", "parameters": parameters}} for n in range(512)]


def parts(kind: str = "text") -> dict[str, Any]:
    """Return a conversation of the most objects."""
    content = [{"type": kind, "text": "hello you and all others here"}] * (MAX_PARTS // MAX_ITEMS["messages"] - 1)
    return {"messages": [{"role": "user", "content": content}] * MAX_ITEMS["messages"]}


def images(side: int) -> dict[str, Any]:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "PNG")
    part = {"type": "image_url", "image_url": {"url": url_of(file.getvalue())}}
    return {"messages": [{"role": "user", "content": [part] * 16}]}


TOO_LONG = "context_length_exceeded"
FAST = {
    "chat completions": ("chat/completions", lambda: talk("messages"), TOO_LONG),
    "responses": ("responses", lambda: talk("input"), TOO_LONG),
    "count_tokens": ("messages/count_tokens", lambda: talk("messages"), "input_tokens"),
    "completions of token ids": ("completions", lambda: {"prompt": [7] * MAX_ITEMS["prompt"]}, TOO_LONG),
}
SLOW = FAST | {
    "messages": ("messages", lambda: talk("messages") | {"max_tokens": 5}, "max_seq_len"),
    "tools": ("chat/completions", lambda: {"messages": [USER], "tools": tools()}, TOO_LONG),
    "one text": ("chat/completions", lambda: {"messages": [{"role": "user", "content": "x" * 8_000_000}]}, TOO_LONG),
    "texts": ("completions", lambda: {"prompt": ["hello " * 10_000] * 128}, "prompts have"),
    "tokenize": ("rollout/tokenize", lambda: {"text": "hello " * 80_000}, "tokens"),
    "values": ("completions", lambda: b'{"prompt": [' + b"[7]," * 2_000_000 + b"[7]]}", "values"),
    "parts": ("chat/completions", parts, TOO_LONG),
    "invalid parts": ("chat/completions", lambda: parts("tex"), "messages"),
    "invalid token ids": ("completions", lambda: {"prompt": ["x"] + [7.5] * (MAX_ITEMS["prompt"] - 1)}, "prompt"),
    "nesting": ("chat/completions", lambda: b'{"x": ' + b"[" * 3_000_000 + b"]" * 3_000_000 + b"}", "values"),
    "prompt": ("completions", lambda: {"prompt": [7] * (CONTEXT - 8), "max_tokens": 4}, "choices"),
    "echo": ("completions", lambda: {"prompt": [7] * (CONTEXT - 8), "max_tokens": 0, "echo": True}, "choices"),
    "scores": ("rollout/score", lambda: {"input_ids": [7] * CONTEXT}, "logprobs"),
    "images": ("chat/completions", lambda: images(8000), TOO_LONG),
    "logprobs": (
        "chat/completions",
        lambda: {"messages": [USER], "n": 8, "max_tokens": 3000, "logprobs": True, "top_logprobs": 20},
        "choices",
    ),
}


def check_health(folder: Path, url: str, cases: dict[str, Any]) -> dict[str, float]:
    """Send the requests, each next to an answer in progress; return the slowest answer of `/health` of each."""
    worst = {}
    sampling = only_text(folder)
    body = {"messages": [USER], "max_tokens": 500} | sampling
    for name, (path, make, expected) in cases.items():
        asked = make()
        if isinstance(asked, dict):
            asked = json.dumps(asked | (sampling if expected == "choices" else {})).encode()
        with ThreadPoolExecutor(4) as pool, Probe().of(url) as probe:
            agent = pool.submit(post, url, "chat/completions", body)
            for status, text in pool.map(post, [url] * 2, [path] * 2, [asked] * 2):
                assert status in (200, 400) and expected in text, f"{name}: {status} {text[:300]}"
            status, text = agent.result()
            assert status == 200, text
        worst[name] = max(probe.seconds)
    return worst


@pytest.mark.slow
def test_health_answers_during_the_largest_requests(folder: Path, url: str) -> None:
    worst = check_health(folder, url, FAST)
    assert max(worst.values()) < HEALTH_SECONDS, worst


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SLOW if name not in FAST])
def test_health_answers_during_every_largest_request(folder: Path, url: str, name: str) -> None:
    worst = check_health(folder, url, {name: SLOW[name]})
    print(worst)
    assert max(worst.values()) < HEALTH_SECONDS, worst
