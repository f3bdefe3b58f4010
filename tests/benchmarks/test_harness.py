"""The harness: sides in processes of their own, in turn, and none left out in silence."""

from __future__ import annotations

import pytest

from archon.tools.bench.origin import spread
from benchmarks import harness
from benchmarks.harness import BenchmarkError, Sides
from tests.tolerances import HELD_MEMORY

MODULE = "tests.benchmarks.sample"
OPTIONS = {"threads": 1, "answer": 42, "bytes": 100_000_000}


def test_sides_run_in_turn_and_a_missing_or_failing_peer_is_reported(capfd):
    with Sides(MODULE, ["archon", "not installed", "fails later", "dies later", "peer"], OPTIONS) as sides:
        assert sides.missing == {"not installed": "ImportError: No module named 'some_peer'"}
        assert sides.facts("peer") == {"side": "peer", "answer": 42}
        runs = sides.alternate(rounds=2, warmup=1, touch="read")
    assert {name: [run["runs"] for run in result] for name, result in runs.items()} == {
        "archon": [2, 3],
        "peer": [2, 3],
    }
    assert all(run["request"] == {"touch": "read"} for result in runs.values() for run in result)
    assert sides.missing["fails later"] == "fails later: ValueError: out of ideas"
    assert "exit code 3" in sides.missing["dies later"]
    said = capfd.readouterr().out
    assert "not installed: MISSING" in said and "dies later: MISSING" in said

    memory = runs["archon"][-1]["memory"]
    assert memory["rss_above_start"] == pytest.approx(OPTIONS["bytes"], rel=HELD_MEMORY)
    assert memory["rss_peak"] > memory["rss_above_start"]
    assert runs["peer"][-1]["memory"]["rss_above_start"] < OPTIONS["bytes"] / 10


@pytest.mark.slow
def test_the_ranks_of_a_side_answer_as_one():
    options = {**OPTIONS, "threads": 2, "ranks": 2, "rank_seconds": 0.5}
    with Sides(MODULE, ["archon", "one rank fails"], options) as sides:
        runs = sides.alternate(rounds=2, warmup=0, touch="read")
    assert [run["request"] for run in runs["archon"]] == [{"touch": "read"}] * 2
    assert all(run["seconds"] >= 0.5 for run in runs["archon"])  # the slower rank's
    memory = runs["archon"][-1]["memory"]
    assert memory["rss_above_start"] == pytest.approx(2 * OPTIONS["bytes"], rel=HELD_MEMORY)
    assert sides.missing == {"one rank fails": "one rank fails: ValueError: out of ideas"}


def test_a_benchmark_ends_when_archon_cannot_run():
    with pytest.raises(BenchmarkError, match="archon cannot run: KeyError: 'answer'"):
        Sides(MODULE, ["archon"], {"threads": 1})


def test_nothing_is_timed_when_the_sides_differ():
    assert harness.check_close("loss", 1.0, {"peer": 1.0 + 1e-7}, 1e-6)[0].difference < 1e-6
    for theirs in (1.1, float("nan")):
        with pytest.raises(BenchmarkError, match="loss of archon and peer differ"):
            harness.check_close("loss", 1.0, {"good": 1.0, "peer": theirs}, 1e-6)
    with pytest.raises(BenchmarkError, match="tokens of archon and peer differ"):
        harness.check_same("tokens", [1, 2], {"peer": [1, 3]})


def test_a_ratio_is_that_of_medians_and_shows_its_rounds():
    ratio = harness.ratio([10.0, 30.0, 20.0], [10.0, 10.0, 5.0], ">= 2")
    assert (ratio.value, ratio.min, ratio.max, ratio.aim_met) == (2.0, 1.0, 4.0, True)
    assert harness.ratio([1.0], [2.0], "<= 0.4").aim_met is False
    assert harness.ratio([1.0], [2.0]).aim_met is None


def test_a_spread_keeps_every_value_and_the_largest_memory():
    runs = [{"memory": {"rss_peak": 3}}, {"memory": {"rss_peak": 5}}, {"memory": {"rss_peak": 4}}]
    found = spread([2.0, 9.0, 4.0], "s", runs)
    assert (found.median, found.min, found.max) == (4.0, 2.0, 9.0)
    assert found.values == [2.0, 9.0, 4.0] and found.memory_bytes == {"rss_peak": 5}
