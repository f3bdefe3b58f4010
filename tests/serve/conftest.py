"""A tiny Qwen3 over printable characters, with a chat template that knows tools, behind a real server on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from archon.generation import InProcessEngine
from archon.generation.types import GenerationHyperparameters
from archon.models.base import BaseArchonModel
from archon.rl.bootstrap import make_tokenizer
from archon.serve import AgentServer
from archon.training.config import TokenizerRecipe
from tests.serve.scripted import Start
from tests.small_qwen3 import small_model


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """One token a printable character."""
    alphabet = "".join(map(chr, range(32, 127)))
    return make_tokenizer(TokenizerRecipe(kind="characters", alphabet=alphabet, chat_template="chatml"))


@pytest.fixture
def model(tokenizer: Any) -> BaseArchonModel:
    return small_model(len(tokenizer), max_seq_len=1024)


@pytest.fixture
def engine(model: BaseArchonModel, tokenizer: Any) -> InProcessEngine:
    return InProcessEngine.from_model(model, tokenizer, max_slots=16, page_size=16, n_pages=512)


@pytest.fixture
async def serve(engine: InProcessEngine, tokenizer: Any) -> AsyncIterator[Start]:
    """Start servers over the real generator, or the one that is given; returns (server, base URL)."""
    servers: list[AgentServer] = []

    async def start(over: Any = engine, **options: Any) -> tuple[AgentServer, str]:
        server = AgentServer(tokenizer, over, GenerationHyperparameters(max_new_tokens=8), **options)
        servers.append(server)
        return server, await server.start()

    yield start
    for server in servers:
        await server.close()


@pytest.fixture
async def client() -> Any:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as made:
        yield made
