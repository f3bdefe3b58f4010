"""The reference model of a run with adapters: its own base, adapters off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archon.engine.engine import ArchonEngine
from archon.engine.reference import FrozenBase, open_reference
from archon.rl import RLTrainer
from archon.schema.config import derive_reference
from archon.tools.check.rank_pool import Pool
from archon.training.config import PreferenceConfig
from archon.training.loop import BaseTrainer
from archon.training.preference import PreferenceTrainer
from tests.engine.tiny import make_engine, sft_batch
from tests.lora.tiny import LORA, MOE, RANDOM, engine_of, rl_run, train

SAVED = {"lora": RANDOM | {"modules_to_save": ["norm", "lm_head", "embed_tokens"]}}


def references(base: str, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs of this rank's rows: of the shared base, of a reference of its own, of the policy."""
    engine = engine_of(base, **{"dtype": "float64", "lora": RANDOM} | options)
    config = derive_reference(engine.config, {}, "ref")
    shared, own = open_reference(engine, config), ArchonEngine(config)
    own.initialize()
    assert isinstance(shared, FrozenBase)
    dp = engine.ranks.dp
    rows = {name: x[dp.rank :: dp.size] for name, x in sft_batch().items()}
    if engine.built.builder.saved_modules:  # they begin as the base
        train(engine, 2)
    policy = engine.forward_batch(rows)
    assert engine.forward_batch(rows).equal(policy)
    scored = shared.forward_batch(rows, 0.7, only_trained=True), own.forward_batch(rows, 0.7, only_trained=True)
    assert engine.forward_batch(rows).equal(policy), "its adapters are on again"
    return *scored, policy


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16"}, {"share_prefixes": False}, SAVED, SAVED | {"dtype": "bfloat16"}]
)
def test_the_base_scores_as_a_reference_of_its_own(base: str, options: dict[str, Any]) -> None:
    shared, own, policy = references(base, options)
    assert shared.equal(own)
    assert (shared - policy).abs().max() > 0.1


@pytest.mark.parametrize("layout", ["d2", "t2", "c2", "p2"])
def test_the_base_scores_as_a_reference_of_its_own_in_every_layout(base: str, ranks: Pool, layout: str) -> None:
    for shared, own, policy in ranks.run(references, base, {"layout": layout}):
        assert shared.equal(own)
        assert (shared - policy).abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["d2", "t2", "c2", "p2"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_saved_modules_are_the_base_again_in_every_layout(base: str, ranks: Pool, layout: str, dtype: str) -> None:
    for shared, own, policy in ranks.run(references, base, SAVED | {"layout": layout, "dtype": dtype}):
        assert shared.equal(own)
        assert (shared - policy).abs().max() > 0.1


@pytest.mark.slow
def test_the_base_scores_as_a_reference_of_its_own_compiled(base: str) -> None:
    shared, own, _ = references(base, {"compile": True})
    torch.testing.assert_close(shared, own, rtol=0, atol=1e-10)


def test_experts_adapters_are_off_too(tmp_path: Path) -> None:
    make_engine(tmp_path / "made", hf=MOE).save(tmp_path / "base")
    shared, own, _ = references(str(tmp_path / "base"), {})
    assert shared.equal(own)


def test_adapters_are_on_again_after_an_error(base: str) -> None:
    engine = engine_of(base, lora=RANDOM)
    policy = engine.forward_batch(sft_batch())
    with pytest.raises(ZeroDivisionError), engine.without_lora():
        raise ZeroDivisionError
    assert engine.forward_batch(sft_batch()).equal(policy)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders of the engines that are initialized."""
    folders: list[str] = []
    initialize = ArchonEngine.initialize

    def counted(engine: ArchonEngine, total_steps: int | None = None) -> None:
        folders.append(engine.config.path)
        initialize(engine, total_steps)

    monkeypatch.setattr(ArchonEngine, "initialize", counted)
    return folders


def test_rl_takes_its_kl_to_its_own_base_and_pushes_adapters(
    checkpoint: Path, tmp_path: Path, opened: list[str]
) -> None:
    shared = RLTrainer(rl_run(checkpoint, tmp_path / "shared"))
    with shared.opened():
        rows = [shared.train_step() for _ in range(4)]
        size = sum(x.numel() * 4 for _, x in shared.engine.lora_weights())
    assert opened == [str(checkpoint)]
    assert [row["push/bytes"] for row in rows] == [size] * 4
    assert max(row["first_logprob_diff"] for row in rows) < 1e-5
    opened.clear()
    # The same run with a reference of its own: only its folder is spelled otherwise.
    apart = rl_run(checkpoint, tmp_path / "apart", ref={"path": f"{checkpoint}/."})
    own = RLTrainer(apart)
    with own.opened():
        expected = [own.train_step() for _ in range(4)]
    assert len(opened) == 2
    assert [row["kl_ref"] for row in rows] == [row["kl_ref"] for row in expected]
    assert rows[-1]["kl_ref"] > 1e-3 > rows[0]["kl_ref"]


def test_pairs_are_compared_with_the_models_own_base(checkpoint: Path, tmp_path: Path, opened: list[str]) -> None:
    def run(name: str, **ref: Any) -> list[float]:
        config = PreferenceConfig.parse(
            {
                "run_dir": str(tmp_path / name), "total_steps": 3, "batch_size": 4, **ref,
                "model": {"path": str(checkpoint), "device": "cpu", "lora": LORA, "optimizer": {"lr": 1e-2}},
                "train_data": {"path": "python:tests.lora.tiny.pairs"},
                "checkpoint": {"every": 0},
            }
        )  # fmt: skip
        return losses_of(PreferenceTrainer(config))

    shared = run("shared")
    assert opened == [str(checkpoint)]
    assert run("apart", ref={"path": f"{checkpoint}/."}) == shared
    assert len(opened) == 3
    assert shared[0] == pytest.approx(0.6931, abs=1e-4)
    assert len(set(shared)) == 3, "the policy moves and its base does not"


def losses_of(trainer: BaseTrainer) -> list[float]:
    losses: list[float] = []
    step: Callable[[], dict[str, float]] = trainer.train_step

    def observed() -> dict[str, float]:
        metrics = step()
        losses.append(metrics["loss"])
        return metrics

    trainer.train_step = observed  # type: ignore[method-assign]
    trainer.train()  # type: ignore[attr-defined]
    return losses
