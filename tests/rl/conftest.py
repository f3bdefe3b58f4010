"""A tiny Qwen3, its character tokenizer and the real in-process generator; nothing of generation is mocked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from archon.engine.engine import ArchonEngine
from archon.generation import InProcessEngine
from archon.models.base import BaseArchonModel
from archon.rl.bootstrap import make_tokenizer, write_blank
from archon.rl.config import RLConfig
from archon.schema.config import EngineConfig
from archon.training.config import BootstrapConfig, TokenizerRecipe
from tests.small_qwen3 import SMALL_QWEN3, small_model


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Digits, `+` and `=`; the chat template is the plain concatenation."""
    return make_tokenizer(TokenizerRecipe(kind="characters", alphabet="0123456789+=", chat_template="plain"))


@pytest.fixture
def model(tokenizer: Any) -> BaseArchonModel:
    return small_model(len(tokenizer))


@pytest.fixture
def engine(model: BaseArchonModel, tokenizer: Any) -> InProcessEngine:
    return InProcessEngine.from_model(model, tokenizer, max_slots=32, page_size=8)


@pytest.fixture(scope="session")
def blank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json and tokenizer of the same model, from which an engine initializes its weights."""
    path = tmp_path_factory.mktemp("blank") / "model"
    recipe = TokenizerRecipe(kind="characters", alphabet="0123456789+=", chat_template="plain")
    write_blank(BootstrapConfig(hf_config=SMALL_QWEN3, tokenizer=recipe), path)
    return path


@pytest.fixture
def rl_config(blank: Path, tmp_path: Path) -> Callable[..., RLConfig]:
    """A small run on the arithmetic set; keywords replace sections."""

    def make(**changes: Any) -> RLConfig:
        return RLConfig.parse(small_run(blank, tmp_path / "run") | changes)

    return make


def fresh_checkpoint(blank: Path, path: Path) -> Path:
    """Return `path`, where the model of `blank` is saved with random weights."""
    engine = ArchonEngine(EngineConfig(path=str(blank), init_from_scratch=True, optimizer=None, device="cpu"))
    engine.initialize()
    engine.save(path)
    return path


def small_run(blank: Path, run_dir: Path) -> dict[str, Any]:
    return {
        "run_dir": str(run_dir),
        "total_steps": 4,
        "actor": {"path": str(blank), "init_from_scratch": True, "optimizer": {"lr": 1e-3}},
        "algorithm": {"kl": {"coef": 0.0}},
        "gconfig": {"n_samples": 4, "max_new_tokens": 4},
        "rollout": {"prompts_per_step": 6, "n_gold_checks": 8, "dump_groups": 6, "workers": {"rewards": 1}},
        "generator": {"max_slots": 32, "page_size": 8},
        "train_data": {"path": "arithmetic"},
        "reward": "tests.rl.rewards_for_tests.nearness",
    }
