"""`archon serve` as a user meets it."""

from __future__ import annotations

import json
import signal
import socket
import urllib.request
from pathlib import Path

import httpx
import pytest

from archon.cli.serve import make_server
from archon.cli.serve_config import ServeConfig
from tests.warm import started_code


def test_serve_answers_until_it_is_interrupted(checkpoint):
    command = ["serve", str(checkpoint), "--port", "0", "--log-requests", "max_new_tokens=4"]
    with started_code(f"from archon.cli import main; main({command})") as server:
        line = server.stdout.readline()
        assert line.startswith("serving checkpoint at http://127.0.0.1:"), server.stderr.read()
        url = line.split()[3]
        body = json.dumps({"messages": [{"role": "user", "content": "1+2="}]}).encode()
        asked = urllib.request.Request(f"{url}/chat/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked) as response:
            answer = json.load(response)
        assert answer["model"] == "checkpoint" and 1 <= answer["usage"]["completion_tokens"] <= 4
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=20) == 0
        logged = server.stderr.read()
        usage = answer["usage"]
        counts = f"prompt_tokens={usage['prompt_tokens']} completion_tokens={usage['completion_tokens']}"
        assert f" POST /v1/chat/completions 200 {counts} " in logged and "Traceback" not in logged


def test_requests_of_a_trained_server_are_not_logged(archon, checkpoint, tmp_path):
    run = archon("serve", checkpoint, "--log-requests", "--train", tmp_path / "run.yaml")
    assert "--log-requests logs no requests of --train" in run.complaint


def test_a_port_in_use_is_one_line(archon, checkpoint):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        complaint = archon("serve", checkpoint, "--port", port).complaint
    assert f"port {port} on 127.0.0.1 is in use" in complaint


@pytest.mark.parametrize("host", ["0.0.0.0", "example.org"])
def test_beyond_loopback_a_token_is_needed(archon, checkpoint, host):
    assert "needs a token: set one with --token" in archon("serve", checkpoint, "--host", host).complaint


def test_a_token_of_nothing_is_refused(archon, checkpoint):
    assert "the token is empty" in archon("serve", checkpoint, "--token", " ").complaint


def test_a_folder_without_a_checkpoint_is_one_line(archon, tmp_path):
    assert str(tmp_path) in archon("serve", tmp_path).complaint


def test_unknown_fields_are_named(archon, checkpoint):
    assert "did you mean 'max_slots'" in archon("serve", checkpoint, "max_slot=3").complaint


async def test_a_checkpoints_generation_defaults_do_not_change_answers(checkpoint: Path) -> None:
    """Where a request sets nothing, sampling is at temperature 1 from the whole distribution, whatever
    generation_config.json says; a request's own values count."""
    body = {"messages": [{"role": "user", "content": "1+2="}], "seed": 3, "return_token_ids": True}

    async def tokens(**changes: float) -> list[int]:
        server = make_server(checkpoint, ServeConfig(max_new_tokens=32), None)
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
                response = await client.post(f"{await server.start()}/chat/completions", json=body | changes)
        finally:
            await server.close()
        answer: list[int] = response.json()["choices"][0]["token_ids"]
        return answer

    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    plain, greedy = await tokens(), await tokens(temperature=0)
    defaults = {"do_sample": True, "temperature": 0.01, "top_k": 1, "top_p": 0.1, "max_new_tokens": 2}
    (checkpoint / "generation_config.json").write_text(json.dumps(defaults))
    assert await tokens() == plain != greedy
    assert len(plain) > 2
    assert await tokens(temperature=0) == greedy
