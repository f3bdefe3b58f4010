"""A fleet whose servers join, leave, fail and come back during a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from archon.remote.config import LaunchConfig, PushConfig
from archon.remote.connect import connect
from archon.remote.engine import NoServerError, RemoteEngine
from archon.remote.launchers.base import Command, ServerHandle
from archon.remote.launchers.launch import LaunchedServers
from archon.schema.errors import RolloutError
from tests.remote.test_engine import Weights, ask, request
from tests.remote.twin import VLLMTwin


@pytest.fixture
def fleet(tokenizer: Any, checkpoint: Path) -> Callable[..., tuple[RemoteEngine, Weights]]:
    """Connect twins and pushes version 0."""

    def make(*servers: VLLMTwin) -> tuple[RemoteEngine, Weights]:
        weights = Weights(checkpoint)
        urls = [server.url for server in servers]
        engine = connect(urls, PushConfig(), vocab_size=len(tokenizer), tokenizer=tokenizer)
        engine.update_weights(weights, version=0)
        return engine, weights

    return make


def test_servers_join_at_a_push_and_leave_at_once(fleet: Any, twin: Callable[..., VLLMTwin]) -> None:
    first, second = twin(), twin()
    engine, weights = fleet(first)
    engine.join(second.url)
    engine.join("http://127.0.0.1:1")
    asked = [request(seed, group=seed) for seed in range(4)]
    ask(engine, *asked)
    assert not second.generated(), "it has none of the run's weights"
    engine.update_weights(weights)
    assert engine.push_metrics["push/servers"] == 2 and second.version == 1
    expected = ask(engine, *asked)
    assert len(second.generated()) >= 2
    engine.leave(first.url)
    before = len(first.generated())
    answers = ask(engine, *asked)
    assert len(first.generated()) == before
    assert [answer.output_tokens for answer in answers] == [answer.output_tokens for answer in expected]
    engine.update_weights(weights)
    assert [server.url for server in engine.servers] == [second.url] and first.version == 1


def test_a_server_that_left_may_join_again(fleet: Any, twin: Callable[..., VLLMTwin]) -> None:
    first, second = twin(), twin()
    engine, weights = fleet(first, second)
    engine.leave(second.url)
    engine.update_weights(weights)
    assert [server.url for server in engine.servers] == [first.url]
    engine.join(second.url)
    for version in (2, 3):
        engine.update_weights(weights)
        assert engine.push_metrics["push/servers"] == 2 and second.version == version


def test_the_only_server_is_started_anew_elsewhere_while_answers_wait(
    fleet: Any, twin: Callable[..., VLLMTwin], tmp_path: Path
) -> None:
    first, second = twin(), twin()
    engine, weights = fleet(first)
    expected = ask(engine, request(1))
    handle = Elsewhere(first, second)
    launched = LaunchedServers(LaunchConfig(seconds=60), Command([], {}), tmp_path, handles=[handle])
    launched.watch(engine)
    try:
        first.stop()
        (answer,) = ask(engine, request(1))
        assert answer.output_tokens == expected[0].output_tokens
        assert engine.servers[0].url == second.url and second.version == 0
        engine.update_weights(weights)
        assert second.version == 1 and engine.push_metrics["push/servers"] == 1
    finally:
        launched.close()


class Elsewhere(ServerHandle):
    """A server that is another one once it is started again."""

    def __init__(self, first: VLLMTwin, second: VLLMTwin) -> None:
        super().__init__("server-0")
        self.url, self._second = first.url, second

    def _start(self) -> None:
        self.url = self._second.url

    def exit_message(self) -> str | None:
        return None

    def stop(self) -> None:
        """Do nothing: the test ends both."""


def test_a_server_comes_back_with_the_weights_of_the_last_push_or_not_at_all(
    fleet: Any, twin: Callable[..., VLLMTwin]
) -> None:
    first, second = twin(), twin()
    engine, _ = fleet(first, second)
    server = engine.servers[0]
    assert not engine.restore_server(server), "it is in the fleet"
    first.weight_version = "default"  # as after a restart
    ask(engine, *(request(seed, group=seed) for seed in range(4)))
    assert server.failure is not None and engine.stats.lost == 1
    first.faults = {"update"}
    with pytest.raises(RolloutError, match="/update_weights answered with status 500"):
        engine.restore_server(server)
    assert "status 500" in str(server.failure)
    first.faults.clear()
    assert engine.restore_server(server) and server.failure is None and first.version == 0
    before = len(first.generated())
    answers = ask(engine, *(request(seed, group=f"new {seed}") for seed in range(4)))
    assert len(first.generated()) > before and engine.stats.returned == 1
    assert all(set(answer.output_versions) == {0} for answer in answers)


def test_losses_are_counted_once_and_by_step(fleet: Any, twin: Callable[..., VLLMTwin]) -> None:
    first, second = twin(), twin()
    engine, weights = fleet(first, second)
    counts = ("servers/lost", "servers/retried", "servers/returned", "push/servers")

    def step() -> list[float]:
        ask(engine, *(request(seed, group=f"{seed} {engine.version}") for seed in range(4)))
        engine.update_weights(weights)
        return [engine.push_metrics[name] for name in counts]

    assert step() == [0, 0, 0, 2]
    first.faults = {"down"}
    assert step() == [1, 2, 0, 1], "lost by its answers, and not again by its push"
    assert step() == [0, 0, 0, 1], "it was out"
    first.faults = set()
    assert step() == [0, 0, 0, 2]
    first.faults = {"update"}
    assert step() == [1, 0, 0, 1], "lost by its push"
    first.faults = set()
    assert engine.restore_server(engine.servers[0])
    assert step() == [0, 0, 1, 2]
    assert (engine.stats.lost, engine.stats.retried, engine.stats.returned) == (2, 2, 1)


def test_servers_that_all_seem_to_fail_are_asked_again_where_they_have_the_weights(
    fleet: Any, twin: Callable[..., VLLMTwin]
) -> None:
    """As after a stop of this process that outlasted every answer: the servers are as they were."""
    first, second, third = twin(), twin(), twin()
    engine, weights = fleet(first, second, third)
    engine.leave(third.url)

    def fail() -> None:
        for server in engine.servers:
            server.failure = server.failure or f"{server.url} did not answer within 10 s"

    fail()
    second.weight_version = "default"  # it was started again
    asked = [request(seed, group=seed) for seed in range(4)]
    answers = ask(engine, *asked)
    assert [server.answers for server in engine.servers] == [4, 0, 0]
    assert all(set(answer.output_versions) == {0} for answer in answers)
    assert "did not answer" in str(engine.servers[1].failure) and engine.stats.returned == 1
    fail()
    # Once after each push, so that servers that fail again and again end the run.
    (error,) = ask(engine, asked[0])
    assert isinstance(error, NoServerError) and "did not answer within 10 s" in str(error)
    second.weight_version = str(engine.servers[1].versions.encode(0))
    engine.update_weights(weights)
    assert engine.push_metrics["servers/returned"] == 1
    fail()
    first.engine.model.norm.weight.data.mul_(2)
    ask(engine, *asked)
    assert [server.failure is None for server in engine.servers] == [False, True], "it computes with other weights"


@pytest.mark.parametrize("send", ["pause", "resume", "prompt_logprobs"])
def test_a_server_that_fails_between_answers_leaves_and_the_others_go_on(
    fleet: Any, twin: Callable[..., VLLMTwin], send: str
) -> None:
    first, second = twin(), twin()
    engine, _ = fleet(first, second)
    expected = engine.prompt_logprobs([3, 4, 5])
    first.faults = {"down"}
    if send == "prompt_logprobs":
        assert engine.prompt_logprobs([3, 4, 5]) == expected
    else:
        getattr(engine, send)()
    assert "status 503" in str(engine.servers[0].failure) and engine.servers[1].failure is None
    engine.resume()
    (answer,) = ask(engine, request(1))
    assert answer.output_tokens and engine.stats.lost == 1
