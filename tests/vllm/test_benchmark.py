"""The generation benchmark with real vLLM as a side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import generate
from benchmarks.checkpoints import make_checkpoint
from benchmarks.vllm_side import RELEASE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.xdist_group("tiny")]


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    made = make_checkpoint(tmp_path / "tiny", "tiny", fields={"head_dim": 32})
    options = {"threads": 2, "checkpoint": str(made), "model": "tiny", "device": "cpu", "dtype": "float32"}
    return options | {"slots": 4, "lengths": [5, 17, 1, 9, 30, 12], "prompt_length": 32}


def test_vllm_generates_the_same_tokens_and_is_timed(
    options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """In its own environment, with every answer's length forced."""
    record = generate.measure("ragged", options, 2, generate.CPU_SIDES, generate.AIMS["ragged"])
    assert record.missing == {}
    assert f"archon and {generate.VLLM} agree in 6 of 6 answers" in capsys.readouterr().out
    assert record.ratios[f"archon / {generate.VLLM}"].aim == generate.VLLM_AIM
    assert record.versions["vllm"].startswith(RELEASE)
    assert len(record.sides[generate.VLLM].values) == 2
