"""The arithmetic run of a small MoE on two processes learns; `make test-rl-layouts` trains it and others to the demo's
reward."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rl_layouts import train

STEPS, GAIN = 150, 0.2
"""Of the recipe's 1,000, after which the sampled reward went from 0.43 to 0.74."""


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.xdist_group("ranks")
def test_the_arithmetic_run_learns_with_its_experts_on_two_processes(tmp_path: Path) -> None:
    found = train("d2e2", tmp_path, [f"total_steps={STEPS}"])
    assert found["code"] == 0 and found["processes"] == 2 and found["steps"] == STEPS
    assert found["reward_after"] >= found["reward_before"] + GAIN
