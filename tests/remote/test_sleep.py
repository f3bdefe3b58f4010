"""A server that shares the trainer's GPU: it sleeps while the trainer computes, and loses no request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from archon.remote.config import LaunchConfig
from archon.remote.connect import connect
from archon.remote.engine import NoServerError, RemoteEngine
from archon.remote.http import KEY
from archon.remote.launchers import launch
from archon.remote.launchers.base import Command, command
from archon.rl import RLTrainer
from archon.rl import servers as rl_servers
from archon.rl.config import RLConfig
from archon.schema.errors import ConfigError
from tests.remote.test_engine import Weights, ask, request
from tests.remote.twin import VLLMTwin

MakeTwin = Callable[..., VLLMTwin]
MakeConfig = Callable[..., RLConfig]
LAUNCH = {"engine": "vllm", "gpu_share": 0.4}


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")


@pytest.fixture(scope="module")
def weights(checkpoint: Path) -> Weights:
    return Weights(checkpoint)


@pytest.fixture
def server(twin: MakeTwin) -> VLLMTwin:
    return twin(sleep_mode=True)


@pytest.fixture
def engine(server: VLLMTwin, tokenizer: Any, weights: Weights) -> RemoteEngine:
    made = connect([server.url], vocab_size=len(tokenizer), tokenizer=tokenizer, colocated=True)
    made.update_weights(weights, version=0)
    return made


def test_a_push_wakes_the_weights_then_loads_then_wakes_the_cache(
    engine: RemoteEngine, server: VLLMTwin, weights: Weights
) -> None:
    server.calls.clear()
    engine.sleep()
    assert server.sleeping == {"weights", "kv_cache"} and server.is_paused
    engine.update_weights(weights, version=1)
    before_score = server.calls[: server.calls.index("/inference/v1/generate")]
    assert before_score == [
        "/sleep?level=1&mode=abort",
        "/pause?mode=abort",
        "/wake_up?tags=weights",
        "/weight_info",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
        "/weight_info",
        "/wake_up?tags=kv_cache",
        "/resume",
    ]
    assert not server.sleeping and not server.is_paused
    (answer,) = ask(engine, request())
    assert answer.output_versions == [1] * len(answer.output_tokens)


def test_a_server_that_is_awake_is_not_woken(engine: RemoteEngine, server: VLLMTwin, weights: Weights) -> None:
    engine.wake()
    engine.update_weights(weights, version=1)
    assert not any("/wake_up" in call for call in server.calls)


def test_sleep_interrupts_answers_and_holds_new_requests_until_the_server_is_awake(
    engine: RemoteEngine, server: VLLMTwin
) -> None:
    (expected,) = ask(engine, request(greedy=True))
    server.faults = {"until_paused"}

    async def run() -> list[Any]:
        early = asyncio.create_task(engine.agenerate(request(greedy=True, rid="early")))
        while not engine.servers[0].running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.sleep)
        server.faults.clear()
        late = asyncio.create_task(engine.agenerate(request(greedy=True, rid="late")))
        await asyncio.sleep(0.3)
        assert not late.done() and len(server.generated()) == asked + 1, "nothing new is sent to a sleeping server"
        await asyncio.to_thread(engine.wake)
        return await asyncio.gather(early, late)

    asked = len(server.generated())
    for answer in asyncio.run(run()):
        assert answer.output_tokens == expected.output_tokens and answer.stop_reason == expected.stop_reason


def test_a_server_that_fails_to_sleep_leaves_the_fleet_until_a_push_succeeds(
    engine: RemoteEngine, server: VLLMTwin, weights: Weights
) -> None:
    server.faults = {"sleep"}
    engine.sleep()
    assert engine.stats.lost == 1 and "/sleep" in str(engine.servers[0].failure)
    server.faults.clear()
    engine.update_weights(weights, version=1)
    assert engine.fleet == engine.servers and not engine.servers[0].asleep


def test_a_failed_push_leaves_no_server_asleep(engine: RemoteEngine, server: VLLMTwin, weights: Weights) -> None:
    engine.sleep()
    server.faults = {"update"}
    with pytest.raises(NoServerError, match="/update_weights answered with status 500"):
        engine.update_weights(weights, version=1)
    assert not engine.servers[0].asleep, "the launcher restarts only servers that do not sleep"


def test_a_server_without_sleep_mode_is_refused(twin: MakeTwin, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"vllm 0\.32\.0 shares the trainer's GPU but runs without sleep mode"):
        connect([twin().url], vocab_size=len(tokenizer), tokenizer=tokenizer, colocated=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"engine": "archon"}, "needs engine vllm, but engine is archon"),
        ({"launcher": "slurm"}, "needs launcher local, but launcher is slurm"),
        ({"count": 2}, "needs count 1, but count is 2"),
    ],
)
def test_what_cannot_share_a_gpu_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LaunchConfig.parse(LAUNCH | change)


def test_asynchronous_rollouts_do_not_share_a_gpu(rl_config: MakeConfig) -> None:
    run = rl_config([]).model_dump()
    run["rollout"] |= {"servers": None, "launch": LAUNCH, "max_staleness": 1}
    with pytest.raises(ConfigError, match=r"rollout\.launch\.gpu_share .* rollout\.max_staleness is 1"):
        RLConfig.parse(run)


def test_the_server_is_started_in_sleep_mode_with_its_share(tmp_path: Path) -> None:
    arguments = command(LaunchConfig.parse(LAUNCH), "M", tmp_path, "bfloat16", None).arguments
    assert "--enable-sleep-mode" in arguments
    assert arguments[arguments.index("--gpu-memory-utilization") + 1] == "0.4"


def test_a_trainer_of_several_processes_does_not_share_a_gpu(
    rl_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = rl_config([]).model_dump()
    run["rollout"] |= {"servers": None, "launch": LAUNCH}
    monkeypatch.setattr(rl_servers.ControlPlane, "with_long_timeout", lambda *_: Mock(size=2))
    with pytest.raises(ConfigError, match="gpu_share shares one GPU, but the trainer has 2 processes"):
        rl_servers.open_servers(RLConfig.parse(run), Mock(), None, [], print)


def test_no_server_is_restarted_while_the_trainer_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "WATCH_SECONDS", 0.01)
    restored = threading.Event()
    monkeypatch.setattr(launch.LaunchedServers, "_restore", lambda *_: restored.set())
    launched = launch.LaunchedServers(LaunchConfig(), Command([], {}), tmp_path)
    launched.handles = [Mock(url="u", failed_starts=0)]
    server = Mock(url="u", pushing=False, asleep=True, failure="it ended")
    launched.watch(Mock(servers=[server]))
    assert not restored.wait(0.3)
    server.asleep = False
    assert restored.wait(10)
    launched.close()


@pytest.fixture
def trainer(rl_config: MakeConfig, server: VLLMTwin, monkeypatch: pytest.MonkeyPatch) -> RLTrainer:
    """A trainer that launches the twin as its server."""
    launched = Mock()
    launched.open.return_value = [server.url]
    monkeypatch.setattr(rl_servers, "_launch_servers", lambda *_: launched)
    run = rl_config([]).model_dump()
    run["rollout"] |= {"servers": None, "launch": LAUNCH}
    return RLTrainer(RLConfig.parse(run))


@pytest.mark.slow
def test_a_run_whose_server_sleeps_during_updates_is_the_run_in_process(
    rl_config: MakeConfig, trainer: RLTrainer, server: VLLMTwin
) -> None:
    plain = RLTrainer(rl_config())
    runs = []
    for run in (plain, trainer):
        with run.opened():
            steps = [run.train_step() for _ in range(2)]
            runs.append(([step["reward"] for step in steps], {k: v.clone() for k, v in run.engine.weights()}))
    assert runs[0][0] == runs[1][0]
    for name, tensor in runs[0][1].items():
        torch.testing.assert_close(runs[1][1][name], tensor, rtol=0, atol=1e-5, msg=name)
    assert [call for call in server.calls if call.startswith(("/sleep", "/wake_up"))] == [
        *(("/sleep?level=1&mode=abort", "/wake_up?tags=weights", "/wake_up?tags=kv_cache") * 2)
    ]
    assert "seconds/sleep" in steps[0]


def test_a_step_without_an_update_wakes_the_server(
    trainer: RLTrainer, server: VLLMTwin, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trainer.opened():
        prepare = trainer.update.prepare

        def nothing_to_learn(*arguments: Any) -> Any:
            prepared, metrics = prepare(*arguments)
            return prepared | {"loss_mask": torch.zeros_like(prepared["loss_mask"])}, metrics

        monkeypatch.setattr(trainer.update, "prepare", nothing_to_learn)
        metrics = trainer.train_step()
        assert metrics["skipped_update"] == 1 and not server.sleeping
        assert trainer.rollout_batch(), "it samples again"
