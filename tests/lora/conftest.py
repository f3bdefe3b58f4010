"""Bases for adapters, and two ranks, once for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from archon.check.rank_pool import Pool
from archon.engine.engine import ArchonEngine
from archon.schema.config import EngineConfig
from tests.engine.tiny import make_engine
from tests.rl.conftest import blank

__all__ = ["blank"]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of the tiny model, with a vocabulary that two ranks can split."""
    folder = tmp_path_factory.mktemp("base")
    make_engine(folder / "made", hf={"vocab_size": 102}).save(folder / "base")
    return str(folder / "base")


@pytest.fixture(scope="session")
def checkpoint(blank: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small Qwen3 with weights and tokenizer."""
    path = tmp_path_factory.mktemp("checkpoint") / "made"
    engine = ArchonEngine(EngineConfig(path=str(blank), init_from_scratch=True, optimizer=None, device="cpu"))
    engine.initialize()
    engine.save(path)
    return path


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Two processes."""
    with Pool(2) as pool:
        yield pool
