"""A second start of a compiled engine finds the blocks that the first one compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

START = """
import json, sys
from pathlib import Path

from torch._dynamo.utils import counters

from archon.engine.loss import CrossEntropyLoss, loss_token_count
from tests.engine.tiny import make_engine, sft_batch

engine = make_engine(Path(sys.argv[1]), compile=True, activation_checkpoint={"mode": sys.argv[2]})
loss = engine.train_batch(sft_batch(), CrossEntropyLoss(), loss_token_count)["loss"]
print(json.dumps({"loss": loss} | counters["aot_autograd"]))
"""


def first_step(folder: Path, mode: str) -> dict[str, float]:
    """Return the loss of the first step in a new process, and how often PyTorch found a block in its cache."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}
    printed = subprocess.check_output([sys.executable, "-c", START, str(folder), mode], env=environment, text=True)
    result: dict[str, float] = json.loads(printed.splitlines()[-1])
    return result


def test_a_second_start_finds_what_the_first_one_compiled(tmp_path: Path) -> None:
    first, second = (first_step(tmp_path, "selective") for _ in range(2))
    found = {name: count for name, count in second.items() if name.startswith("autograd_cache_")}
    assert "autograd_cache_hit" not in first and found == {"autograd_cache_hit": 1}, (first, second)
    assert second["loss"] == first["loss"]
