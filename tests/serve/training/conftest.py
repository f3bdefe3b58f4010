"""A real `archon serve-training` process over a tiny Qwen3, and the unmodified SDK as its client."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.rl.bootstrap import make_tokenizer
from archon.training.config import TokenizerRecipe
from tests.small_qwen3 import SMALL_QWEN3

os.environ.setdefault("TINKER_TELEMETRY", "0")
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny Qwen3 over printable characters."""
    return make_base(tmp_path_factory.mktemp("base") / "qwen3")


def make_base(folder: Path) -> Path:
    """Write a checkpoint of a tiny Qwen3 over printable characters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    alphabet = "".join(map(chr, range(32, 127)))
    tokenizer = make_tokenizer(TokenizerRecipe(kind="characters", alphabet=alphabet, chat_template="chatml"))
    torch.manual_seed(0)
    sizes = {**SMALL_QWEN3, "max_position_embeddings": 256, "vocab_size": len(tokenizer), "initializer_range": 0.1}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    Qwen3ForCausalLM(Qwen3Config(**sizes, **ids)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def running(base: Path, state: Path, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL and the process of `archon serve-training`."""
    command = [sys.executable, "-m", "archon", "serve-training", str(base), "--port", "0", "--state", str(state)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("ARCHON_TOKEN", None)
    with subprocess.Popen(
        [*command, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert " at http://" in line, line
            yield line.split(" at ")[1].split()[0], process
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="session")
def url(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server without tokens, for all tests of a worker."""
    with running(base, tmp_path_factory.mktemp("state"), "max_models=16") as (address, _):
        yield address


Connect = Callable[..., Any]


@pytest.fixture
def connect(url: str) -> Iterator[Connect]:
    """Return a `tinker.ServiceClient` of an API key; its session ends with the test."""
    import tinker

    clients = []

    def make(key: str = "tml-one", address: str = url) -> Any:
        clients.append(tinker.ServiceClient(base_url=address, api_key=key))
        return clients[-1]

    yield make
    for client in clients:
        client.close("success").result(30)


@pytest.fixture
def train(base: Path, connect: Connect) -> Callable[..., Any]:
    """Return a training client of a new session."""

    def make(key: str = "tml-one", **options: Any) -> Any:
        return connect(key).create_lora_training_client(base_model=str(base), **{"rank": 4, **options}).result(30)

    return make
