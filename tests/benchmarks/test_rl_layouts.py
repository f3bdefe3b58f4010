"""The recipe learns in a layout what it learns on one process; `make test-rl-layouts` runs it in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rl_layouts import AIM, train


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.xdist_group("ranks")
def test_the_arithmetic_recipe_reaches_its_reward_on_four_ranks(tmp_path: Path) -> None:
    found = train("d2t2", tmp_path, [])
    assert found["code"] == 0
    assert found["reward_before"] < 0.5
    assert found["reward_after"] >= AIM
