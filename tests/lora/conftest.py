"""Bases for adapters, and two ranks, once for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from archon.tools.check.rank_pool import Pool
from tests.engine.tiny import make_engine
from tests.rl.conftest import blank, fresh_checkpoint

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
    return fresh_checkpoint(blank, tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pool]:
    """Two processes."""
    with Pool(2) as pool:
        yield pool
