"""The real pretrained model, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import real_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct: Llama's architecture, 30 layers of 9 heads, tied embeddings, float32."""
    return real_model.make(real_model.folder())
