"""Kernels against plain float64 formulas: on a GPU, elsewhere in Triton's interpreter; nothing is collected without."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNS = importlib.util.find_spec("triton") is not None and (INTERPRETED or torch.cuda.is_available())
collect_ignore_glob = [] if RUNS else ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cpu" if INTERPRETED else "cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark these tests `gpu` where they run on one, so that `make test-gpu` selects and records them."""
    for item in items:
        if not INTERPRETED and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)
