"""The reference model of a run with adapters: its own base, adapters off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archon.check.rank_pool import Pool
from archon.engine.engine import ArchonEngine
from archon.engine.reference import FrozenBase, open_reference
from archon.rl import RLTrainer
from archon.rl.config import RLConfig
from archon.schema.config import derived_reference
from archon.training.config import PreferenceConfig
from archon.training.loop import BaseTrainer
from archon.training.preference import PreferenceTrainer
from tests.engine.tiny import make_engine, sft_batch
from tests.lora.test_training import LORA, engine_of

RANDOM = LORA | {"init": "random"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("base")
    make_engine(folder / "made", hf={"vocab_size": 102}).save(folder / "base")  # an even number, for t2
    return str(folder / "base")


def references(base: str, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs of this rank's rows: of the shared base, of a reference of its own, of the policy."""
    engine = engine_of(base, **{"dtype": "float64", "lora": RANDOM} | options)
    config = derived_reference(engine.config, {}, "ref")
    shared, own = open_reference(engine, config), ArchonEngine(config)
    own.initialize()
    assert isinstance(shared, FrozenBase)
    dp = engine.ranks.dp
    rows = {name: x[dp.rank :: dp.size] for name, x in sft_batch().items()}
    policy = engine.forward_batch(rows)
    assert engine.forward_batch(rows).equal(policy)
    scored = shared.forward_batch(rows, 0.7, only_trained=True), own.forward_batch(rows, 0.7, only_trained=True)
    assert engine.forward_batch(rows).equal(policy), "its adapters are on again"
    return *scored, policy


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"share_prefixes": False}])
def test_the_base_scores_as_a_reference_of_its_own(base: str, options: dict[str, Any]) -> None:
    shared, own, policy = references(base, options)
    assert shared.equal(own)
    assert (shared - policy).abs().max() > 0.1


def test_the_base_scores_as_a_reference_of_its_own_in_every_layout(base: str) -> None:
    with Pool(2) as pool:
        for layout in ({"layout": "d2"}, {"layout": "t2"}, {"layout": "c2"}, {"layout": "p2"}):
            for shared, own, policy in pool.run(references, base, layout):
                assert shared.equal(own), layout
                assert (shared - policy).abs().max() > 0.1


@pytest.mark.slow
def test_the_base_scores_as_a_reference_of_its_own_compiled(base: str) -> None:
    shared, own, _ = references(base, {"compile": True})
    torch.testing.assert_close(shared, own, rtol=0, atol=1e-10)


def test_experts_adapters_are_off_too(tmp_path: Path) -> None:
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    make_engine(tmp_path / "made", hf=experts | {"norm_topk_prob": True}).save(tmp_path / "base")
    shared, own, _ = references(str(tmp_path / "base"), {})
    assert shared.equal(own)


def test_adapters_are_on_again_after_an_error(base: str) -> None:
    engine = engine_of(base, lora=RANDOM)
    policy = engine.forward_batch(sft_batch())
    with pytest.raises(ZeroDivisionError), engine.without_adapters():
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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small Qwen3 with weights and tokenizer."""
    from archon.rl.bootstrap import write_blank
    from archon.schema.config import EngineConfig
    from archon.training.config import BootstrapConfig, TokenizerRecipe
    from tests.small_qwen3 import SMALL_QWEN3

    folder = tmp_path_factory.mktemp("checkpoint")
    recipe = TokenizerRecipe(kind="characters", alphabet="0123456789+=", chat_template="plain")
    write_blank(BootstrapConfig(hf_config=SMALL_QWEN3, tokenizer=recipe), folder / "blank")
    made = EngineConfig(path=str(folder / "blank"), init_from_scratch=True, optimizer=None, device="cpu")
    engine = ArchonEngine(made)
    engine.initialize()
    engine.save(folder / "made")
    return folder / "made"


def rl_run(checkpoint: Path, run_dir: Path, /, **changes: Any) -> RLConfig:
    from tests.rl.conftest import small_run

    actor = {"path": str(checkpoint), "device": "cpu", "optimizer": {"lr": 1e-2}, "lora": LORA}
    values = small_run(checkpoint, run_dir) | {"actor": actor, "ref": {}, "algorithm": {"kl": {"coef": 0.1}}}
    return RLConfig.parse(values | changes)


def test_rl_takes_its_kl_to_its_own_base_and_pushes_adapters(
    checkpoint: Path, tmp_path: Path, opened: list[str]
) -> None:
    shared = RLTrainer(rl_run(checkpoint, tmp_path / "shared"))
    with shared.opened():
        rows = [shared.train_step() for _ in range(4)]
        size = sum(x.numel() * 4 for _, x in shared.engine.adapter_weights())
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
                "train_data": {"path": "python:tests.lora.test_reference.pairs"},
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


def pairs(split: str) -> list[dict[str, str]]:
    return [{"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": str(n)} for n in range(1, 20)]
