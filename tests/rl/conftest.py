"""A tiny Qwen3, its character tokenizer and the real in-process generator; nothing of generation is mocked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from archon.models.base import BaseArchonModel
from archon.models.qwen3 import Qwen3Model, Qwen3ModelArgs
from archon.rl.bootstrap import make_tokenizer
from archon.rl.config import TokenizerRecipe
from archon.rl.generation import InProcessEngine


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Digits, `+` and `=`; the chat template is the plain concatenation."""
    return make_tokenizer(TokenizerRecipe(kind="characters", alphabet="0123456789+=", chat_template="plain"))


@pytest.fixture
def model(tokenizer: Any) -> BaseArchonModel:
    torch.manual_seed(0)
    args = Qwen3ModelArgs(
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        hidden_dim=48,
        vocab_size=len(tokenizer),
        max_seq_len=64,
        initializer_range=0.3,
    )
    built = Qwen3Model(args)
    built.init_weights()
    built.init_buffers("cpu")
    return built


@pytest.fixture
def engine(model: BaseArchonModel, tokenizer: Any) -> InProcessEngine:
    return InProcessEngine.from_model(model, tokenizer, max_slots=32, page_size=8)
