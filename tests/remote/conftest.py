"""Twins of vLLM that serve the tied tiny Qwen3 of `tests/rl`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from archon.rl.config import RLConfig
from tests.remote.twin import VLLMTwin
from tests.rl.conftest import blank, fresh_checkpoint, small_run, tokenizer

__all__ = ["blank", "tokenizer"]


@pytest.fixture(scope="session")
def checkpoint(blank: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as a Hugging Face checkpoint."""
    return fresh_checkpoint(blank, tmp_path_factory.mktemp("served") / "model")


@pytest.fixture
def twin(checkpoint: Path) -> Iterator[Callable[..., VLLMTwin]]:
    """Start twins, which end with the test."""
    started: list[VLLMTwin] = []

    def start(**settings: Any) -> VLLMTwin:
        started.append(VLLMTwin(checkpoint, **settings))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def rl_config(blank: Path, tmp_path: Path) -> Callable[..., RLConfig]:
    """A small run on the arithmetic set, on servers where `servers` names some; keywords replace sections."""

    def make(servers: list[str] | None = None, **changes: Any) -> RLConfig:
        run = small_run(blank, tmp_path / "run") | changes
        if servers is not None:
            run = {**run, "generator": None, "rollout": {**run["rollout"], "servers": servers}}
        return RLConfig.parse(run)

    return make
