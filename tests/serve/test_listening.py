"""Addresses that cannot be used: one line, before a model is loaded, at every server that archon starts."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from archon.remote.launchers.base import Command, LocalHandle
from archon.rl.monitor import Monitor
from archon.schema.errors import ConfigError
from archon.schema.listening import listening
from archon.serve import AgentServer
from archon.serve.service import check_address
from archon.tools.report.page_server import ReportServer

HOSTS = {
    "203.0.113.7": "is no address of this machine",
    "2001:db8::1": "is no address of this machine",
    "256.1.1.1": "has no address here",
    "no.such.host.invalid": "has no address here",
    "a" * 300: "has no address here",
    "a..b": "has no address here",
    "localhost ": "has no address here",
    "127.0.0.1\0": "has no address here",
    "/tmp/socket": "has no address here",
    "fe80::1%nope": "has no address here",
    "224.0.0.1": "is a multicast address",
    "ff02::1": "is a multicast address",
}


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_that_cannot_be_used_is_one_line(host: str) -> None:
    with pytest.raises(ConfigError, match=HOSTS[host]) as caught:
        check_address(host, 0, "token")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


@pytest.mark.parametrize("host", ["203.0.113.7", "a..b", "no.such.host.invalid"])
def test_a_server_says_the_same_if_the_address_is_lost_after_the_check(host: str, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=HOSTS[host]):
        asyncio.run(AgentServer(tokenizer, token="token").start(host))


def test_a_port_in_use_is_named_by_every_server(taken: int, tmp_path: Path) -> None:
    expected = f"port {taken} on 127.0.0.1 is in use"
    for start in (
        lambda: check_address("127.0.0.1", taken, None),
        lambda: ReportServer(tmp_path, taken),
        lambda: Monitor(taken, dict, None),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError, match=expected):
            start()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_a_port_that_needs_rights_is_named(number: int) -> None:
    with (
        pytest.raises(ConfigError, match=r"rollout\.push\.port: port 80 on 127.0.0.1 needs more rights"),
        listening("127.0.0.1", 80, "rollout.push.port"),
    ):
        raise OSError(number, "error while attempting to bind on address ('127.0.0.1', 80)")


@pytest.mark.parametrize("host", ["::1", "[::1]", "localhost", "127.0.0.2"])
def test_addresses_of_loopback_are_served(host: str, tokenizer: Any) -> None:
    async def answer() -> int:
        server = AgentServer(tokenizer)
        url = await server.start(host)
        try:
            with await asyncio.to_thread(urllib.request.urlopen, url.removesuffix("/v1") + "/health") as response:
                return int(response.status)
        finally:
            await server.close()

    check_address(host, 0, None)
    assert asyncio.run(answer()) == 200


@pytest.mark.parametrize("options", [[], ["--train", "run.yaml"]])
def test_the_address_is_checked_before_the_model_is_read(
    options: list[str], taken: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from archon.cli import main

    with pytest.raises(SystemExit):
        main(["serve", str(tmp_path), "--port", str(taken), *options])
    assert f"port {taken} on 127.0.0.1 is in use" in capsys.readouterr().err


def test_a_restarted_server_leaves_a_port_that_another_process_has_taken(tmp_path: Path) -> None:
    command = Command([sys.executable, "-c", "import time; time.sleep(60)"], {})
    handle = LocalHandle("server-0", command, tmp_path)
    try:
        handle.start()
        first = handle.url
        handle.start()
        assert handle.url == first, "a free port is kept"
        handle.stop()
        with socket.create_server(("127.0.0.1", int(first.rpartition(":")[2]))):
            handle.start()
            assert handle.url != first
    finally:
        handle.stop()
