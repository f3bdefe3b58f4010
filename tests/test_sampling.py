"""The sample of test parameters depends on the commit and covers all of them over many commits."""

from __future__ import annotations

import pytest

from tests.sampling import deselected

TESTS = [f"tests/a.py::test_{name}[{number}]" for name in ("one", "two") for number in range(40)]
ALONE = ["tests/a.py::test_alone", "tests/b.py::test_of_two[x]", "tests/b.py::test_of_two[y]"]


def test_each_function_runs_with_about_so_many_of_its_parameters() -> None:
    out = deselected(TESTS + ALONE, 4, b"commit")
    assert out == deselected(reversed(TESTS + ALONE), 4, b"commit"), "processes that collect differently agree"
    assert 40 < len(out) < 75 and ALONE[0] not in out and len(out & {*ALONE}) <= 1
    assert deselected(TESTS + ALONE, 1, b"commit") == set()


def test_a_sample_of_functions_runs_whole_functions_as_before() -> None:
    functions = [f"tests/c.py::test_{number}[{letter}]" for number in range(40) for letter in "ab"]
    out = deselected(functions, 1, b"commit", sample_functions=2)
    kept = {*functions} - out
    assert 20 < len(kept) < 60 and {nodeid.partition("[")[0] + "[a]" for nodeid in kept} <= kept
    assert {*functions} - deselected(functions, 4, b"commit", 2) <= kept


@pytest.mark.parametrize("sample_functions", [1, 2])
def test_over_commits_all_of_them_run(sample_functions: int) -> None:
    never = {*TESTS, *ALONE}
    for number in range(60):
        never &= deselected(TESTS + ALONE, 4, b"%d" % number, sample_functions)
    assert not never
