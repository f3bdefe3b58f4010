"""Traces of what runs on CUDA, where PyTorch is built for it; elsewhere nothing here is collected."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest
import torch

collect_ignore_glob = ["test_*.py"] if torch.version.cuda is None else []


@pytest.fixture(scope="session", autouse=True)
def _flash_attn() -> None:
    from tests.cuda_traced.stand_ins import flash_attn_without_kernels

    flash_attn_without_kernels()


@pytest.fixture
def traced(request: pytest.FixtureRequest) -> Callable[[str, str, str], None]:
    """Say what a test traces: (family, attention backend, what of it). A row of the record, with whether it passed."""

    def say(family: str, backend: str, what: str) -> None:
        row = {"family": family, "backend": backend, "what": what}
        request.node.user_properties.append(("traced", row))

    return say


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append the rows of a test to the file ARCHON_CUDA_TRACED_RECORD, JSON lines."""
    record = os.environ.get("ARCHON_CUDA_TRACED_RECORD")
    if record is None or report.when != "call":
        return
    with open(record, "a", encoding="utf-8") as file:
        for name, row in report.user_properties:
            if name == "traced":
                found = {"ok": report.passed, "torch": torch.__version__}
                file.write(json.dumps(row | found, ensure_ascii=False) + "\n")
