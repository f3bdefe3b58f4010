"""A tiny Qwen3 with a token for every printable character, and short runs on environments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from archon.rl.bootstrap import make_tokenizer, write_blank
from archon.rl.config import RLConfig
from archon.training.config import BootstrapConfig, TokenizerRecipe
from tests.small_qwen3 import SMALL_QWEN3

SPEAKS = TokenizerRecipe(kind="characters", alphabet="".join(map(chr, range(32, 127))) + "\n'’", chat_template="chatml")


@pytest.fixture(scope="session")
def speaker() -> Any:
    return make_tokenizer(SPEAKS)


@pytest.fixture(scope="session")
def speaking_blank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("blank") / "model"
    write_blank(BootstrapConfig(hf_config=SMALL_QWEN3 | {"max_position_embeddings": 2048}, tokenizer=SPEAKS), path)
    return path


@pytest.fixture
def short_run(speaking_blank: Path, tmp_path: Path) -> Callable[..., RLConfig]:
    """Three steps; keywords replace sections."""

    def make(**changes: Any) -> RLConfig:
        return RLConfig.parse(
            {
                "run_dir": str(tmp_path / "run"),
                "total_steps": 3,
                "actor": {"path": str(speaking_blank), "init_from_scratch": True, "optimizer": {"lr": 1e-3}},
                "algorithm": {"kl": {"coef": 0.0}},
                "gconfig": {"n_samples": 2, "max_new_tokens": 6},
                "rollout": {"prompts_per_step": 2, "dump_groups": 2, "workers": {"rewards": 1}},
                "generator": {"max_slots": 4, "page_size": 16, "max_seq_len": 1536},
            }
            | changes
        )

    return make
