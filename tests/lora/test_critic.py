"""A critic that is an adapter with a value head on the actor's base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from archon.engine.batch import PackedBatch
from archon.engine.engine import ArchonEngine
from archon.engine.loss import loss_token_count
from archon.models.lora.model import is_lora, share_frozen
from archon.rl import RLTrainer
from archon.rl.config import RLConfig
from archon.schema.config import EngineConfig, derive_critic
from archon.schema.errors import CheckpointError, ConfigError
from archon.tools.check.rank_pool import Pool
from archon.training.config import PreferenceConfig
from tests.engine.tiny import sft_batch
from tests.lora.tiny import LORA, engine_of, rl_run, train

SIZES = {"rank": 3, "alpha": 5.0, "init": "random"}


def squares(values: Tensor, entropy: Tensor | None, mb: PackedBatch) -> Tensor:
    """A loss of values: their squared distance from 1."""
    return ((values - 1).square() * (mb["loss_mask"] != 0)).sum()


def critics(base: str, options: dict[str, Any]) -> tuple[list[dict[str, Tensor]], bool]:
    """Gradients and weights after two steps, of a critic on the actor's base and of one apart; is memory shared?"""
    actor = engine_of(base, **{"dtype": "float64"} | options)
    found = []
    shared = False
    for share in (True, False):
        critic = ArchonEngine(derive_critic(actor.config, {"lora": SIZES, "optimizer": {"lr": 1e-2}}, "critic"))
        critic.initialize()
        if share:
            critic.share_base(actor)
            train(actor, 1)
            theirs = dict(actor.model.named_parameters())
            frozen = [(n, p) for n, p in critic.model.named_parameters() if not p.requires_grad]
            shared = bool(frozen) and all(theirs[name] is parameter for name, parameter in frozen)
        dp = actor.ranks.dp
        rows = {name: x[dp.rank :: dp.size] for name, x in sft_batch().items()}
        gradients, _ = critic.gradients(rows, squares, loss_token_count)
        for _ in range(2):
            critic.train_batch(rows, squares, loss_token_count)
        weights = {name: x.clone() for name, x in critic.lora_weights()}
        assert "score.weight" in gradients and any(map(is_lora, gradients))
        found += [gradients, weights]
    return found, shared


def require_equal(found: list[dict[str, Tensor]]) -> None:
    for ours, theirs in zip(found[:2], found[2:], strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-10)


def test_a_critic_on_the_actors_base_trains_as_one_apart(base: str) -> None:
    found, shared = critics(base, {})
    assert shared
    require_equal(found)


def test_a_bfloat16_base_is_shared_and_the_value_head_is_float32(base: str) -> None:
    found, shared = critics(base, {"dtype": "bfloat16"})
    assert shared
    require_equal(found)
    assert found[0]["score.weight"].dtype == torch.float32


def test_frozen_weights_are_shared_only_with_the_same_shape_and_dtype() -> None:
    def layers(*dtypes: torch.dtype, width: int = 3) -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, 3, bias=False, dtype=dtype) for dtype in dtypes)).requires_grad_(False)

    owner, model = layers(torch.float32, torch.bfloat16), layers(torch.float32, torch.float32)
    share_frozen(model, owner)
    assert model[0].weight is owner[0].weight
    assert model[1].weight is not owner[1].weight and model[1].weight.dtype == torch.float32
    wider = layers(torch.float32, torch.bfloat16, width=4)
    share_frozen(wider, owner)
    assert wider[0].weight.shape == (3, 4)
    trained = layers(torch.float32, torch.bfloat16).requires_grad_()
    share_frozen(trained, owner)
    assert trained[0].weight is not owner[0].weight


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["d2", "t2", "c2"])
def test_a_critic_on_the_actors_base_trains_as_one_apart_in_every_layout(base: str, ranks: Pool, layout: str) -> None:
    for found, shared in ranks.run(critics, base, {"layout": layout}):
        assert shared
        require_equal(found)


def ppo(checkpoint: Path, run_dir: Path, /, **changes: Any) -> RLConfig:
    settings = {"preset": "ppo", "kl": {"coef": 0.0}, "minibatches": 2, "value_clip": None}
    critic = {"lora": {"rank": 3}, "optimizer": {"lr": 3e-3}}
    common = {"algorithm": settings, "critic": critic, "ref": None, "gconfig": {"n_samples": 1, "max_new_tokens": 4}}
    return rl_run(checkpoint, run_dir, **common | {"checkpoint": {"every": 2}} | changes)


@pytest.mark.slow
def test_ppo_trains_two_adapters_on_one_base_and_resumes(checkpoint: Path, tmp_path: Path) -> None:
    whole = RLTrainer(ppo(checkpoint, tmp_path / "whole"))
    whole.train()
    assert whole.critic is not None
    sizes = {size.rank for size in whole.critic.lora.values()}, {size.rank for size in whole.engine.lora.values()}
    assert sizes == ({3}, {LORA["rank"]})
    halves = RLTrainer(ppo(checkpoint, tmp_path / "halves", total_steps=2))
    halves.train()
    resumed = RLTrainer(ppo(checkpoint, tmp_path / "halves", resume=True))
    resumed.train()
    assert resumed.critic is not None
    for engine, other in ((whole.engine, resumed.engine), (whole.critic, resumed.critic)):
        expected = {n: p for n, p in engine.model.named_parameters() if p.requires_grad}
        found = dict(other.model.named_parameters())
        assert all(found[name].equal(parameter) for name, parameter in expected.items())
    assert any("score" in name for name, p in whole.critic.model.named_parameters() if p.requires_grad)
    other = ppo(checkpoint, tmp_path / "halves", resume=True, total_steps=6)
    other = other.model_copy(update={"critic": {"lora": {"rank": 3, "alpha": 9.0}, "optimizer": {"lr": 3e-3}}})
    with pytest.raises(CheckpointError, match="the critic's LoRA there has other sizes or another base"):
        RLTrainer(other).train()
    other = other.model_copy(update={"critic": {"optimizer": {"lr": 3e-3}}})
    with pytest.raises(CheckpointError, match="the critic trains a LoRA there and all weights here"):
        RLTrainer(other).train()


def test_a_critic_that_trained_all_weights_is_not_resumed_with_adapters(checkpoint: Path, tmp_path: Path) -> None:
    run = ppo(checkpoint, tmp_path / "run", total_steps=1)
    RLTrainer(run.model_copy(update={"critic": {"optimizer": {"lr": 3e-3}}})).train()
    with pytest.raises(CheckpointError, match="the critic trains all weights there and a LoRA here"):
        RLTrainer(ppo(checkpoint, tmp_path / "run", resume=True)).train()


def test_what_cannot_hold_a_value_head_is_refused(base: str) -> None:
    data = {"path": "python:tests.lora.tiny.pairs"}
    several = {"path": base, "lora": {"loras": {"one": {}}}}
    with pytest.raises(ConfigError, match=r"one value head, and lora\.loras names several"):
        EngineConfig.parse(several | {"is_critic": True, "init_score": True})
    with pytest.raises(ConfigError, match=r"actor\.lora\.loras names several LoRAs"):
        RLConfig.parse({"run_dir": "x", "actor": several, "train_data": data, "reward": "exact_match"})
    model = {"path": base, "lora": {}}
    with pytest.raises(ConfigError, match=r"a value head, and no command loads a LoRA with one; set model\.lora"):
        PreferenceConfig.parse({"run_dir": "x", "loss": "reward", "model": model, "train_data": data})
