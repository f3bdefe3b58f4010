"""The arithmetic run on four processes learns what it does on one; for other layouts see `make test-rl-layouts`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rl_layouts import AIM, train


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.xdist_group("ranks")
def test_the_arithmetic_run_reaches_the_demos_reward_on_four_processes(tmp_path: Path) -> None:
    found = train("d2t2", tmp_path, [])
    assert found["code"] == 0 and found["steps"] == 1000
    assert found["reward_before"] < 0.5 and found["reward_after"] >= AIM
