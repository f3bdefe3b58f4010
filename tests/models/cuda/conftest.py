"""Kernels against plain float64 formulas: on a GPU, elsewhere in Triton's interpreter; nothing is collected without."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNS = importlib.util.find_spec("triton") is not None and (INTERPRETED or torch.cuda.is_available())
collect_ignore_glob = [] if RUNS else ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cpu" if INTERPRETED else "cuda")
