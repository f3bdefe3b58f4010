"""The arithmetic run of a small MoE on two processes learns what the demo does; for the other layouts there is `make
test-rl-layouts`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rl_layouts import AIM, train

STEPS = 750
"""Of the recipe's 1,000; four experts get there sooner."""


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.xdist_group("ranks")
def test_the_arithmetic_run_reaches_the_demos_reward_with_its_experts_on_two_processes(tmp_path: Path) -> None:
    found = train("d2e2", tmp_path, [f"total_steps={STEPS}"])
    assert found["code"] == 0 and found["processes"] == 2 and found["steps"] == STEPS
    assert found["reward_after"] >= AIM
