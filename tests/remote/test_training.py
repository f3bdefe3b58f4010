"""RL with answers from a server: the same run as in process, push by push."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from archon.data.encoding import encode_prompt
from archon.remote.config import PushConfig
from archon.remote.engine import NoServerError, spaced_token_ids
from archon.rl import RLTrainer
from archon.rl.config import RLConfig
from archon.schema.errors import ConfigError
from archon.training.metrics import read_jsonl
from tests.distributed.test_failing import torchrun
from tests.remote.twin import VLLMTwin
from tests.rl.conftest import small_run
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
        assert server.version == 0, "the trainer's weights, not those that the server began with"
        generator, rows = trainer.generator, trainer.prompts.rows
        first = encode_prompt(trainer.tokenizer, rows[0]) + encode_prompt(trainer.tokenizer, rows[1])
        assert generator.probe[: len(first)] == first and len(generator.probe) == generator.max_seq_len - 1
        metrics = trainer.train_step()
        pushed = trainer.generator.folder / "version-1"
        size = sum(path.stat().st_size for path in pushed.iterdir())
        assert [path.name for path in trainer.generator.folder.iterdir()] == ["version-1"]
        batch = trainer.rollout_batch().trajectories
    assert not trainer.generator.folder.exists(), "a run leaves nothing in shared memory"
    assert server.version == 1 and metrics["version"] == 1
    assert metrics["push/servers"] == 1 and metrics["push/bytes"] == size
    assert 0 < metrics["push/difference"] < FIRST_RATIO_FP32
    assert set(batch["versions"][batch["loss_mask"] == 1].tolist()) == {1}


FAILED_PUSHES = {
    "stale_head": r"scores the probe tokens .* away from the trainer after a push of version 1",
    "forgetful": r"scores the probe tokens .* away from the trainer after a push of version 2",
    "version": r"has weights of version '7' after a push of version 3",
    "update": r"/update_weights answered with status 500",
    "cache_in_use": r"the prefix cache is in use",
    "down": r"answered with status 503",
}


def test_a_server_whose_push_failed_is_left_out_paused_until_one_succeeds(
    rl_config: MakeConfig, twin: MakeTwin
) -> None:
    good, bad = twin(), twin()
    trainer = RLTrainer(rl_config([good.url, bad.url], total_steps=9))
    with trainer.opened():
        for fault, message in FAILED_PUSHES.items():
            bad.faults = {fault}
            metrics = trainer.train_step()
            assert metrics["push/servers"] == 1 and metrics["servers/lost"] == (fault == next(iter(FAILED_PUSHES)))
            assert re.search(message, str(trainer.generator.servers[1].failure))
            assert bad.is_paused and not good.is_paused, f"after fault {fault}"
        asked = len(bad.generated())
        bad.faults.clear()
        metrics = trainer.train_step()
        assert len(bad.generated()) == asked + 1, "the probe of the push alone"
        assert metrics["push/servers"] == 2 and metrics["servers/lost"] == 0 and trainer.generator.stats.lost == 1
        trainer.train_step()
        assert len(bad.generated()) > asked + 2
        good.faults, bad.faults = {"stale_head"}, {"stale_head"}
        with pytest.raises(NoServerError, match=rf"{good.url} scores the probe .*; {bad.url} scores the probe"):
            trainer.train_step()


def test_settings_that_contradict_servers_are_refused(rl_config: MakeConfig) -> None:
    servers = ["http://127.0.0.1:1"]
    with pytest.raises(ConfigError, match=r"rollout.servers: .* cannot be reached"):
        RLTrainer(rl_config(servers)).train()
    run: dict[str, Any] = rl_config(servers).model_dump()
    for change, message in (
        ({"generator": {"max_slots": 4}}, "generator.max_slots is set, but with rollout.servers servers sample"),
        ({"rollout": {"servers": [""]}}, "rollout.servers: got ''; expected http://HOST:PORT"),
        ({"rollout": {"push": {"transport": "disk"}}}, "rollout.push is set without rollout.servers"),
        ({"mode": "bench", "experiences": {}, "eval_data": {"path": "arithmetic"}}, "mode is bench"),
    ):
        with pytest.raises(ConfigError, match=message):
            RLConfig.parse(run | change)


def test_the_probe_covers_the_vocabulary() -> None:
    assert sorted(spaced_token_ids(12, 64)) == list(range(12))
    ids = torch.tensor(spaced_token_ids(151_936, 64))
    assert len(ids) == len(ids.unique()) == 64 and ids.max() > 149_000


def test_asynchronous_answers_go_on_over_pushes_and_are_never_too_old(rl_config: MakeConfig, twin: MakeTwin) -> None:
    server = twin(max_slots=1)  # so slow that pushes interrupt answers
    config = rl_config([server.url], gconfig={"n_samples": 4, "max_new_tokens": 40, "ignore_eos": True})
    config.rollout.max_staleness, config.rollout.prompts_per_step = 2, 2
    trainer = RLTrainer(config)
    with trainer.opened():
        for step in range(4):
            batch = trainer.rollout_batch()
            versions = batch.trajectories["versions"][batch.trajectories["loss_mask"] == 1]
            assert versions.max() <= step and versions.min() >= step - 2
            metrics = trainer.train_step()
            assert metrics["staleness_max"] <= 2 and metrics["push/servers"] == 1
        assert trainer.generator.stats.resumed > 0, "answers that a push interrupted"
        assert trainer.generator.stats.lost == 0 and 0 < metrics["rollout/overlap"] <= 1


@pytest.mark.slow
def test_answers_are_sampled_while_the_policy_is_trained(rl_config: MakeConfig, twin: MakeTwin) -> None:
    """Both take equally long: with two versions ahead hardly any of the generation is waited for."""
    seconds, server = 0.3, twin()
    config = rl_config([server.url])
    config.rollout.max_staleness = 2
    trainer = RLTrainer(config)
    with trainer.opened():
        server.answer_seconds, update = seconds, trainer.update.train

        def as_long(batch: Any, step: int) -> dict[str, float]:
            started = time.monotonic()
            metrics = update(batch, step)
            time.sleep(max(0.0, seconds - (time.monotonic() - started)))
            return metrics

        trainer.update.train = as_long  # type: ignore[method-assign]
        shares = []
        for _ in range(7):
            shares.append(trainer.train_step()["rollout/overlap"])
            trainer.step += 1
    # The first answers have no training to be sampled in.
    assert sum(shares[2:]) / 5 >= 0.8, shares
    assert max(shares) <= 1


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_two_ranks_push_once_and_train_as_one_process_does(blank: Path, twin: MakeTwin, tmp_path: Path) -> None:
    runs = []
    for layout in ("d1", "d2"):
        folder = tmp_path / layout
        run = small_run(blank, folder) | {"generator": None}
        run["actor"] |= {"layout": layout}
        run["rollout"] |= {"servers": [twin().url]}
        (tmp_path / f"{layout}.yaml").write_text(yaml.safe_dump(run))
        arguments = ("archon", "rl", "--config", str(tmp_path / f"{layout}.yaml"))
        if layout == "d1":
            subprocess.run([sys.executable, "-m", *arguments], check=True, timeout=240)
        else:
            code, output, _ = torchrun(*arguments)
            assert code == 0, output
        records = read_jsonl(folder / "metrics.jsonl")
        runs.append([record for record in records if "push/difference" in record])
    assert [step["version"] for step in runs[1]] == [1, 2, 3, 4]
    for alone, together in zip(*runs, strict=True):
        assert alone["reward"] == together["reward"]
        assert together["push/difference"] < FIRST_RATIO_FP32 and together["push/servers"] == 1


def test_broadcast_weights_are_those_of_a_checkpoint_and_a_server_that_fails_holds_up_no_other(
    rl_config: MakeConfig, twin: MakeTwin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("archon.remote.weight_stream.BUCKET_BYTES", 4096)
    good, bad = twin(), twin()
    config = rl_config([good.url, bad.url])
    config.rollout.push = PushConfig(transport="gloo", seconds=30)
    trainer = RLTrainer(config)
    with trainer.opened():
        metrics = trainer.train_step()
        assert metrics["push/servers"] == 2 and 0 < metrics["push/difference"] < FIRST_RATIO_FP32
        bad.faults = {"stream"}
        assert trainer.train_step()["push/servers"] == 1
        assert re.search("status 500: .*connection reset", str(trainer.generator.servers[1].failure))
        bad.faults.clear()
        metrics = trainer.train_step()
        assert metrics["push/servers"] == 2, "a new group a push: what failed left nothing behind"
        exported = dict(trainer.engine.hf_weights())
        for server in (good, bad):
            served = load_file(server.folder / "model.safetensors")
            assert served.keys() == exported.keys()
            assert all(served[name].equal(tensor) for name, tensor in exported.items()), "bit for bit"
        assert metrics["push/bytes"] >= good.streamed[-1] == sum(tensor.nbytes for tensor in exported.values())


def test_what_changed_is_pushed_where_it_is_little_and_the_server_has_the_rest(
    rl_config: MakeConfig, twin: MakeTwin
) -> None:
    """In bfloat16 a small step leaves most elements as they were; in float32 it changes nearly all."""
    for dtype, patches in (("bfloat16", [False, True, True]), ("float32", [False, False, False])):
        server = twin(dtype=dtype)
        config = rl_config([server.url])
        config.rollout.push = PushConfig(transport="delta", max_difference=0.5)
        config.actor.optimizer.lr = 1e-5
        config.logprob_check.max_mismatch = 0.5
        trainer = RLTrainer(config)
        with trainer.opened():
            pushed = [trainer.train_step()["push/bytes"] for _ in range(2)]
            exported = load_file(trainer.generator.folder / "version-2" / "model.safetensors")
            served = load_file(server.folder / "model.safetensors")
            assert all(served[name].equal(tensor) for name, tensor in exported.items()), "bit for bit"
        assert server.patched == patches
        whole = 69_000 if dtype == "float32" else 36_000
        assert all(size < whole / 3 for size in pushed) if patches[1] else all(size > whole for size in pushed)
