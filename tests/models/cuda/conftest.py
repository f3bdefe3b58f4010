"""Kernels against float64 formulas, on a GPU or in Triton's interpreter; nothing is collected without Triton."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNS = importlib.util.find_spec("triton") is not None and (INTERPRETED or torch.cuda.is_available())
collect_ignore_glob = [] if RUNS else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _loop_bounds() -> Iterator[None]:
    """Let loops in the interpreter end at a loaded number: NumPy 2.4 no longer makes an int of an array of one."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    with mock.patch.object(interpreter, "_patch_lang_tensor", patched):
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cpu" if INTERPRETED else "cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark these tests `gpu` on a GPU, so that `make test-gpu` selects and records them."""
    for item in items:
        if not INTERPRETED and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)
