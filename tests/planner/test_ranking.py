"""How orders of layouts are compared; `python -m benchmarks.plan_ranking` does it with measured steps."""

from __future__ import annotations

import pytest

from benchmarks.plan_ranking import kendall_tau


@pytest.mark.parametrize(
    ("foretold", "tau"),
    [([1, 2, 3, 4], 1.0), ([4, 3, 2, 1], -1.0), ([2, 1, 4, 3], 1 / 3), ([1, 1, 1, 1], 0.0), ([1, 2, 2, 3], 5 / 6)],
)
def test_kendalls_tau_counts_the_pairs_in_the_same_order(foretold: list[float], tau: float) -> None:
    found = [(float(place), value) for place, value in enumerate(foretold)]
    score = 0
    for i in range(4):
        for j in range(i + 1, 4):
            if foretold[i] < foretold[j]:
                score += 1
            elif foretold[i] > foretold[j]:
                score -= 1
    assert kendall_tau(found) == score / 6 == pytest.approx(tau)
    assert kendall_tau(found[::-1]) == kendall_tau(found)


def test_pairs_of_different_models_are_not_compared() -> None:
    assert kendall_tau([(1.0, 30.0), (2.0, 40.0)], [(10.0, 2.0), (11.0, 1.0)]) == 0
    assert kendall_tau([(1.0, 30.0), (2.0, 40.0)], [(10.0, 1.0), (11.0, 2.0)]) == 1
