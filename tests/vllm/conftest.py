"""Real vLLM, where `.ci/setup_vllm` has made its environment; elsewhere nothing here is collected."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from archon.checkpoint.tokenizer import load_tokenizer
from archon.rl.bootstrap import write_blank
from archon.rl.config import RLConfig
from archon.training.config import BootstrapConfig, TokenizerRecipe
from benchmarks.vllm_side import is_installed
from tests.rl.conftest import fresh_checkpoint
from tests.vllm.server import VLLMServer

collect_ignore_glob = [] if is_installed() else ["test_*.py"]

# vLLM's attention for CPUs has no heads below 32, and its start encodes English text.
TIED_QWEN3: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session")
def blank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json and tokenizer of a tied Qwen3 with one token a printable character."""
    path = tmp_path_factory.mktemp("blank") / "model"
    recipe = TokenizerRecipe(kind="characters", alphabet=string.printable[:-3], chat_template="plain")
    write_blank(BootstrapConfig(hf_config=TIED_QWEN3, tokenizer=recipe), path)
    return path


@pytest.fixture(scope="session")
def checkpoint(blank: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That model with random weights."""
    return fresh_checkpoint(blank, tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="session")
def tokenizer(blank: Path) -> Any:
    return load_tokenizer(blank)


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., VLLMServer]]:
    """Start servers, which end with the session."""
    started: list[VLLMServer] = []

    def start(model: Path, *options: str, **settings: Any) -> VLLMServer:
        log = tmp_path_factory.mktemp("vllm") / "log"
        started.append(VLLMServer(model, log, *options, **settings))
        return started[-1].wait()

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def server(serve: Callable[..., VLLMServer], checkpoint: Path) -> VLLMServer:
    """vLLM with the random model; tests push their own weights."""
    return serve(checkpoint, "--enable-lora", "--max-lora-rank", "8", extension="tests.vllm.stale_head.Extension")


@pytest.fixture
def rl_config(checkpoint: Path, tmp_path: Path) -> Callable[..., RLConfig]:
    """20 steps on the arithmetic set on the servers given; keywords replace sections."""

    def make(*servers: VLLMServer, **changes: Any) -> RLConfig:
        run = {
            "run_dir": str(tmp_path / "run"),
            "total_steps": 20,
            "actor": {"path": str(checkpoint), "optimizer": {"lr": 1e-3}},
            "algorithm": {"kl": {"coef": 0.0}},
            "gconfig": {"n_samples": 4, "max_new_tokens": 8},
            "rollout": {
                "prompts_per_step": 6,
                "n_gold_checks": 8,
                "workers": {"rewards": 1},
                "servers": [server.url for server in servers],
            },
            "train_data": {"path": "arithmetic"},
            "reward": "tests.rl.rewards_for_tests.nearness",
        }
        return RLConfig.parse(run | changes)

    return make
