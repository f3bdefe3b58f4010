"""RL with answers from a server: the same run as in process, push by push."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from archon.remote.engine import NoServerError
from archon.rl import RLTrainer
from archon.rl.config import RLConfig
from archon.schema.errors import ConfigError
from tests.remote.twin import VLLMTwin
from tests.tolerances import FIRST_RATIO_FP32

# Three steps of Adam at 1e-3, on logprobs that differ by the rounding of a batch of another size.
WEIGHTS = 1e-5

MakeConfig = Callable[..., RLConfig]
MakeTwin = Callable[..., VLLMTwin]


def test_a_run_on_a_server_is_the_run_in_process(rl_config: MakeConfig, twin: MakeTwin) -> None:
    """Greedy and sampled answers, rewards, losses and weights: the twin generates as the in-process engine does."""
    runs = []
    for servers in (None, [twin().url]):
        trainer = RLTrainer(rl_config(servers))
        with trainer.opened():
            batch = trainer.rollout_batch().trajectories
            steps = [trainer.train_step() for _ in range(3)]
            weights = {name: tensor.clone() for name, tensor in trainer.engine.weights()}
        runs.append((batch["input_ids"], [step["reward"] for step in steps], weights))
        assert all(step["first_logprob_diff"] < FIRST_RATIO_FP32 for step in steps)
    (ids, rewards, weights), (remote_ids, remote_rewards, remote_weights) = runs
    assert ids.equal(remote_ids) and rewards == remote_rewards
    for name, tensor in weights.items():
        torch.testing.assert_close(remote_weights[name], tensor, rtol=0, atol=WEIGHTS, msg=name)


def test_every_push_is_verified_and_counted(rl_config: MakeConfig, twin: MakeTwin) -> None:
    server = twin()
    trainer = RLTrainer(rl_config([server.url]))
    with trainer.opened():
        assert server.weight_version == "0", "the trainer's weights, not those that the server began with"
        metrics = trainer.train_step()
        pushed = trainer.generator.folder / "version-1"
        size = sum(path.stat().st_size for path in pushed.iterdir())
        assert [path.name for path in trainer.generator.folder.iterdir()] == ["version-1"]
        batch = trainer.rollout_batch().trajectories
    assert server.weight_version == "1" and metrics["version"] == 1
    assert metrics["push/servers"] == 1 and metrics["push/bytes"] == size
    assert 0 < metrics["push/difference"] < FIRST_RATIO_FP32
    assert set(batch["versions"][batch["loss_mask"] == 1].tolist()) == {1}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("stale_head", r"scores the tokens of a probe .* away from the trainer after a push of version 1"),
        ("forgetful", r"scores the tokens of a probe .* away"),
        ("version", r"has weights of version 7 after a push of version 1"),
        ("update", r"/update_weights answered with status 500"),
        ("cache_in_use", r"the prefix cache is in use"),
        ("down", r"answered with status 503"),
    ],
)
def test_a_push_that_fails_ends_a_run_without_another_server(
    rl_config: MakeConfig, twin: MakeTwin, fault: str, message: str
) -> None:
    server = twin()
    trainer = RLTrainer(rl_config([server.url]))
    with trainer.opened():
        server.faults.add(fault)
        with pytest.raises(NoServerError, match=message):
            trainer.train_step()


def test_a_server_whose_push_failed_is_left_out_paused_until_one_succeeds(
    rl_config: MakeConfig, twin: MakeTwin
) -> None:
    good, bad = twin(), twin()
    trainer = RLTrainer(rl_config([good.url, bad.url]))
    with trainer.opened():
        bad.faults.add("stale_head")
        assert trainer.train_step()["push/servers"] == 1
        asked = len(bad.generated())
        bad.faults.clear()
        metrics = trainer.train_step()
        assert len(bad.generated()) == asked + 1, "the probe of the push alone"
        assert metrics["push/servers"] == 2 and trainer.generator.stats.lost == 1
        trainer.train_step()
        assert len(bad.generated()) > asked + 2


def test_settings_that_contradict_servers_are_refused(rl_config: MakeConfig) -> None:
    servers = ["http://127.0.0.1:1"]
    with pytest.raises(ConfigError, match=r"rollout.servers: .* cannot be reached"):
        RLTrainer(rl_config(servers)).train()
    run: dict[str, Any] = rl_config(servers).model_dump()
    for change, message in (
        ({"generator": {"max_slots": 4}}, "generator is set, and rollout.servers sample instead"),
        ({"rollout": {"push": {"transport": "disk"}}}, "rollout.push is set, and rollout.servers are not"),
        ({"mode": "bench", "experiences": {}, "eval_data": {"path": "arithmetic"}}, "mode is bench"),
    ):
        with pytest.raises(ConfigError, match=message):
            RLConfig.parse(run | change)


def test_the_probe_covers_the_vocabulary() -> None:
    from archon.remote.engine import spread_tokens

    assert sorted(spread_tokens(12, 64)) == list(range(12))
    ids = torch.tensor(spread_tokens(151_936, 64))
    assert len(ids) == len(ids.unique()) == 64 and ids.max() > 149_000
