"""`archon serve` as a user meets it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest


def test_serve_answers_until_it_is_interrupted(checkpoint):
    command = [sys.executable, "-m", "archon", "serve", str(checkpoint), "--port", "0", "max_new_tokens=4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
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
        assert "Traceback" not in server.stderr.read()


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
