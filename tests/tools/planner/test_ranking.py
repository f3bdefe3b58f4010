"""How orders of layouts are compared, and how the planner's does against measured steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from archon.tools.bench.origin import origin
from archon.tools.planner.hardware import Hardware
from benchmarks.plan_ranking import AIM, RANKED, RECORD, Sizes, kendall_tau, predicted, record_lines


@pytest.mark.parametrize(
    ("predicted", "tau"),
    [([1, 2, 3, 4], 1.0), ([4, 3, 2, 1], -1.0), ([2, 1, 4, 3], 1 / 3), ([1, 1, 1, 1], 0.0), ([1, 2, 2, 3], 5 / 6)],
)
def test_kendalls_tau_counts_the_pairs_in_the_same_order(predicted: list[float], tau: float) -> None:
    found = [(float(place), value) for place, value in enumerate(predicted)]
    score = 0
    for i in range(4):
        for j in range(i + 1, 4):
            if predicted[i] < predicted[j]:
                score += 1
            elif predicted[i] > predicted[j]:
                score -= 1
    assert kendall_tau(found) == score / 6 == pytest.approx(tau)
    assert kendall_tau(found[::-1]) == kendall_tau(found)


def test_pairs_of_different_models_are_not_compared() -> None:
    assert kendall_tau([(1.0, 30.0), (2.0, 40.0)], [(10.0, 2.0), (11.0, 1.0)]) == 0
    assert kendall_tau([(1.0, 30.0), (2.0, 40.0)], [(10.0, 1.0), (11.0, 2.0)]) == 1


def test_the_record_says_what_was_measured_and_what_not() -> None:
    rows = [
        {"layout": "d1", "predicted_s": 2.0, "measured_s": 1.0},
        {"layout": "d2", "predicted_s": 4.0, "measured_s": 3.0},
    ]
    failed = {"layout": "d4", "predicted_s": 1.0, "reason": "failed: out of memory"}
    head, *lines = json.loads(json.dumps(record_lines(origin("it"), {"dense": [*rows, failed]})))
    assert (head["command"], head["tau"], head["tau_of_models"]) == ("it", 1, {"dense": 1})
    assert [line["layout"] for line in lines] == ["d1", "d2", "d4"]
    assert {line["model"] for line in lines} == {"dense"}


def test_the_planner_orders_layouts_as_their_steps_were_measured(tmp_path: Path) -> None:
    """Step on gloo ranks, timed by `make test-ranking`; what is predicted of them is what the planner says today."""
    head, *rows = map(json.loads, RECORD.read_text().splitlines())
    hardware = Hardware.model_validate(head["hardware"])
    for name, ranked in RANKED.items():
        now = predicted(ranked, Sizes(**head["sizes"]), hardware, tmp_path / name)
        measured = {row["layout"]: row["measured_s"] for row in rows if row["model"] == name}
        assert measured.keys() == now.keys() and len(measured) >= 12
        assert kendall_tau([(measured[layout], seconds.total) for layout, seconds in now.items()]) >= AIM
    assert head["tau"] >= AIM
