"""The port of a run: numbers for Prometheus, and servers that join and leave."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from archon.remote.engine import RemoteStats
from archon.remote.http import KEY
from archon.remote.prometheus import Metric, gauge, render
from archon.rl.monitor import Monitor
from archon.schema.errors import ConfigError


class Fleet:
    """What a monitor needs of a `RemoteEngine`."""

    def __init__(self) -> None:
        facts = SimpleNamespace(facts=SimpleNamespace(kind="vllm"))
        common: dict[str, Any] = {"dialect": facts, "running": 2, "answers": 7, "tokens": 99}
        good = SimpleNamespace(url="http://a:1", version=3, failure=None, **common)
        bad = SimpleNamespace(url="http://b:1", version=None, failure='"dead"', **common)
        self.servers, self.stats = [good, bad], RemoteStats(lost=1, returned=2, retried=4, resumed=5)
        self.changes: list[tuple[str, str]] = []

    def join(self, url: str) -> None:
        self.changes.append(("join", url))

    def leave(self, url: str) -> None:
        self.changes.append(("leave", url))


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def monitor(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[Monitor]:
    monkeypatch.setenv(KEY, "secret")
    made = Monitor(0, lambda: {"step": 4, "reward": 0.5, "push/difference": float("nan"), "text": "x"}, fleet)  # type: ignore[arg-type]
    yield made
    made.close()


def test_a_scrape_has_the_last_step_and_every_server(monitor: Monitor) -> None:
    answer = httpx.get(f"{monitor.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    assert {"archon_run_reward 0.5", "archon_run_push_difference NaN", "archon_requests_retried_total 4.0"} <= set(
        lines
    )
    assert {"archon_servers_lost_total 1.0", "archon_servers_returned_total 2.0"} <= set(lines)
    assert "archon_requests_resumed_total 5.0" in lines
    assert 'archon_server_in_fleet{url="http://a:1",kind="vllm"} 1.0' in lines
    assert 'archon_server_version{url="http://b:1",kind="vllm"} -1.0' in lines
    assert "# TYPE archon_server_answers_total counter" in lines and "archon_run_text" not in answer.text
    listed = httpx.get(f"{monitor.url}/servers").json()["servers"]
    assert [server["failure"] for server in listed] == [None, '"dead"']


def test_servers_join_and_leave_with_the_key_alone(monitor: Monitor, fleet: Fleet) -> None:
    url, own = f"{monitor.url}/servers", {"Authorization": "Bearer secret"}
    body = {"url": "http://c:1"}
    assert httpx.post(url, json=body, headers=own).status_code == 202
    assert httpx.request("DELETE", url, json=body, headers=own).status_code == 202
    assert fleet.changes == [("join", "http://c:1"), ("leave", "http://c:1")]
    refused = [
        (httpx.post(url, json=body), 401),
        (httpx.post(url, content=b'{"url": "http://c:1"}', headers=own), 400),  # as a page of another site would
        (httpx.post(url, json={"url": "file:///etc"}, headers=own), 400),
        (httpx.post(url, json=[], headers=own), 400),
        (httpx.post(f"{monitor.url}/other", json=body, headers=own), 404),
        (httpx.get(f"{monitor.url}/metrics", headers={"Host": "evil.example"}), 403),
        (httpx.get(f"{monitor.url}/"), 404),
    ]
    for answer, status in refused:
        assert answer.status_code == status, answer.text
    assert len(fleet.changes) == 2


def test_a_port_in_use_is_said() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match=r"rollout.push.port: .* is in use"),
    ):
        Monitor(taken.getsockname()[1], dict, Fleet())  # type: ignore[arg-type]


def test_names_labels_and_numbers_are_what_prometheus_reads() -> None:
    text = render([gauge("a/b", "two\nlines", float("inf")), Metric("c", "d", [({"e": 'f"\\\n'}, 1)], "counter")])
    assert text == (
        '# HELP a_b two\\nlines\n# TYPE a_b gauge\na_b +Inf\n# HELP c d\n# TYPE c counter\nc{e="f\\"\\\\\\n"} 1.0\n'
    )
