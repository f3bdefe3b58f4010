"""Continuous integration runs a sample of the slow tests, another one for each commit."""

from __future__ import annotations

from tests.slow_sample import left_out

TESTS = [f"tests/a.py::test_{name}[{number}]" for name in ("one", "two") for number in range(40)]
ALONE = ["tests/a.py::test_alone", "tests/b.py::test_of_two[x]", "tests/b.py::test_of_two[y]"]


def test_each_function_runs_with_about_so_many_of_its_parameters() -> None:
    out = left_out(TESTS + ALONE, 4, b"commit")
    assert out == left_out(reversed(TESTS + ALONE), 4, b"commit"), "processes that collect differently agree"
    assert 40 < len(out) < 75 and ALONE[0] not in out and len(out & {*ALONE}) <= 1
    assert left_out(TESTS + ALONE, 1, b"commit") == set()


def test_over_commits_all_of_them_run() -> None:
    never = {*TESTS, *ALONE}
    for number in range(40):
        never &= left_out(TESTS + ALONE, 4, b"%d" % number)
    assert not never
