"""The planner's order of layouts is that of measured steps, on ranks of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.plan_ranking import AIM, RANKED, RANKS, Sizes, calibrated, kendall_tau, pairs, rank_layouts, table


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


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@pytest.mark.timeout(3000)
def test_layouts_are_ranked_as_they_are_measured(tmp_path: Path) -> None:
    """Times are compared with one another, none with a number: only their order is asserted."""
    hardware = calibrated(RANKS, tmp_path)
    assert hardware.gpus_per_node == RANKS and 1 <= hardware.processors <= RANKS
    assert hardware.layer_overhead_s > 0 and hardware.node_latency_s > 0 and hardware.overlap == 0
    rows = rank_layouts(RANKED["dense"], hardware, Sizes(tokens=1024, steps=5), 1, tmp_path / "model")
    assert [row["reason"] for row in rows if "reason" in row] == []
    assert len(pairs(rows)) >= 12
    assert kendall_tau(pairs(rows)) >= AIM, "\n".join(table("dense", rows))
