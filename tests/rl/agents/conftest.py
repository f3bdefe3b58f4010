"""A tiny Qwen3 over printable characters with a Hermes chat template, behind a real server on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from archon.models.base import BaseArchonModel
from archon.models.qwen3 import Qwen3Model, Qwen3ModelArgs
from archon.rl.agents import AgentServer
from archon.rl.bootstrap import make_tokenizer
from archon.rl.config import TokenizerRecipe
from archon.rl.generation import InProcessEngine
from archon.rl.types import GenerationHyperparameters
from tests.rl.agents.scripted import HERMES, Start


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """One token a printable character."""
    alphabet = "".join(map(chr, range(32, 127)))
    made = make_tokenizer(TokenizerRecipe(kind="characters", alphabet=alphabet, chat_template="chatml"))
    made.chat_template = HERMES
    return made


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
        max_seq_len=1024,
        initializer_range=0.3,
    )
    built = Qwen3Model(args)
    built.init_weights()
    built.init_buffers("cpu")
    return built


@pytest.fixture
def engine(model: BaseArchonModel, tokenizer: Any) -> InProcessEngine:
    return InProcessEngine.from_model(model, tokenizer, max_slots=16, page_size=16, n_pages=512)


@pytest.fixture
async def serve(engine: InProcessEngine, tokenizer: Any) -> AsyncIterator[Start]:
    """Starts servers over the real generator, or the one that is given; gives back (server, base URL)."""
    servers: list[AgentServer] = []

    async def start(over: Any = engine, **options: Any) -> tuple[AgentServer, str]:
        server = AgentServer(tokenizer, over, GenerationHyperparameters(max_new_tokens=8), **options)
        servers.append(server)
        return server, await server.start()

    yield start
    for server in servers:
        await server.close()
