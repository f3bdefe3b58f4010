"""The real pretrained models, made once; Gemma 3 only where its folder is named, since it takes minutes to make."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from archon.tools.bench.origin import commit, versions
from tests.real_model import GEMMA3, SMOLLM2

collect_ignore = [] if GEMMA3.variable in os.environ else ["test_gemma3.py"]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct: Llama's architecture, 30 layers of 9 heads, tied embeddings, float32."""
    return SMOLLM2.make(SMOLLM2.folder)


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """The folder of Gemma 3 270M: 18 layers of 4 heads, windows of 512 in five of six, 262,144 tokens, float32."""
    return GEMMA3.make(GEMMA3.folder)


@pytest.fixture
def write_figures(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Append what a test has measured to the file ARCHON_REAL_RECORD, if that is set."""

    def write(**figures: object) -> None:
        if record := os.environ.get("ARCHON_REAL_RECORD"):
            line = {"test": request.node.name} | figures | {"commit": commit(), "versions": versions()}
            with open(record, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    return write
