"""Clients of the training service are killed, and the service itself: `benchmarks.training_soak`, for seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.training.conftest import ROOT

pytest.importorskip("tinker")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("training_service")]


def test_kills_lose_and_repeat_no_update(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    command = [sys.executable, "-m", "benchmarks.training_soak", "--record", str(record)]
    options = ["--clients", "3", "--minutes", "0.4", "--server-kills", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    parts = {line["part"]: line for line in map(json.loads, record.read_text().splitlines())}
    assert parts.keys() == {"clients", "server"}, done.stderr[-2000:]
    assert parts["clients"]["client_kills"] > 0
    assert parts["server"]["failed"] > 0  # requests without a result failed
    for part in parts.values():
        assert (part["failures"], part["hung"], part["unanswered"], part["missing_states"]) == ([], 0, 0, 0), part
        assert part["complaints"] == "", part
        assert part["checked_loras"] > 0, part
        assert part["weights_difference"] <= 1e-5, part
        assert part["replayed_loss_difference"] <= 1e-4, part
