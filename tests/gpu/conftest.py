"""A record of what ran on a GPU."""

from __future__ import annotations

import json
import os

import pytest
import torch


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append a test's result to the file ARCHON_GPU_RECORD, JSON lines."""
    record = os.environ.get("ARCHON_GPU_RECORD")
    if record is None or report.when != "call" or "PYTEST_XDIST_WORKER" in os.environ:
        return
    row = {"test": report.nodeid.removeprefix("tests/gpu/"), "ok": report.passed, "gpu": torch.cuda.get_device_name(0)}
    with open(record, "a", encoding="utf-8") as file:
        file.write(json.dumps(row | {"torch": torch.__version__}, ensure_ascii=False) + "\n")
