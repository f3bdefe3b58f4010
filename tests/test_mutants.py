"""The catalog of planted mistakes fits the source, and its record says what it claims to."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from archon.bench.origin import ROOT
from tests import planting
from tests.mutants import MUTANTS
from tests.planting import ENOUGH, Mutant, Outcome, copy_tree, line_of, run_tests, summary_of, tracked_files

RECORD = ROOT / "benchmarks" / "records" / "mutants.jsonl"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_mistake_stands_once_parses_and_changes_the_program(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    planted = ast.parse(mutant.applied(text))
    assert ast.dump(planted) != ast.dump(ast.parse(text))


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_mutant_names_tests_that_there_are() -> None:
    for mutant in MUTANTS:
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert (ROOT / file).exists(), f"{mutant.name}: {file} is gone"
            assert not name or name.partition("[")[0] in functions_of(ROOT / file), f"{mutant.name}: {test} is gone"


def test_no_two_mutants_share_a_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_the_record_is_of_these_mutants_and_of_one_commit() -> None:
    *lines, last = [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]
    summary = last["summary"]
    assert {line["mutant"] for line in lines} <= {mutant.name for mutant in MUTANTS}, "run make test-mutants"
    assert summary_of(lines).items() <= summary.items()
    assert summary["share"] >= ENOUGH
    assert {line["commit"] for line in lines} == {summary["commit"]}
    assert not summary["commit"].endswith("+"), "a record belongs to a commit"


def test_a_snippet_that_stands_there_twice_or_not_at_all_is_refused() -> None:
    mutant = Mutant("both", "x.py", "a = 1\n", "a = 2\n", ("tests/test_x.py",))
    for text, times in (("", 0), ("a = 1\na = 1\n", 2)):
        with pytest.raises(ValueError, match=f"both: its snippet occurs {times} times in x.py, expected once"):
            mutant.applied(text)


def test_a_copy_of_the_tree_has_its_links_and_nothing_that_git_does_not_know(tmp_path: Path) -> None:
    files = tracked_files()
    copy_tree(files, tmp_path)
    assert (tmp_path / "archon" / "models").is_symlink()
    assert (tmp_path / "archon" / "models" / "head.py").read_text() == (ROOT / "models" / "head.py").read_text()
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_symlink() or p.is_file()} == set(files)


TESTS = """
import time
def add(a, b): return a + b
def test_fine(): assert add(0, 1) == 1
def test_sum(): assert add(2, 1) == 3
def test_late(): time.sleep({seconds})
"""


def sample(folder: Path, seconds: float = 0.0, change: tuple[str, str] = ("", ""), timeout: float = 120.0) -> Outcome:
    """What happens to a small folder's tests, with a change of its source."""
    (folder / "tests").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "tests" / "test_sample.py").write_text(TESTS.format(seconds=seconds).replace(*change))
    return run_tests(folder, ["tests/test_sample.py"], folder, timeout=timeout)


def test_tests_that_pass_have_noticed_nothing(tmp_path: Path) -> None:
    outcome = sample(tmp_path)
    assert (outcome.failed, outcome.caught, outcome.error) == (None, False, None)


def test_the_first_test_that_fails_is_named(tmp_path: Path) -> None:
    outcome = sample(tmp_path, change=("return a + b", "return a * a - b"))
    assert outcome.failed == "tests/test_sample.py::test_fine" and outcome.caught
    line = line_of(MUTANTS[0], outcome, "abc")
    assert line["by"] == outcome.failed and line["caught"] and line["commit"] == "abc"


def test_a_source_that_cannot_be_imported_is_an_error_and_no_success(tmp_path: Path) -> None:
    outcome = sample(tmp_path, change=("import time", "import no_such_module"))
    assert not outcome.caught and outcome.error is not None and "no_such_module" in outcome.error


@pytest.mark.slow
def test_a_hang_counts_as_caught_and_says_so(tmp_path: Path) -> None:
    outcome = sample(tmp_path, seconds=60.0, timeout=10.0)
    assert outcome.caught and outcome.failed is None
    assert line_of(MUTANTS[0], outcome, "abc")["by"] == "time-out after 10 s"


def test_the_command_refuses_a_name_that_no_mutant_has() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutants", "--only", "no such mistake"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "no mutant's name or file holds no such mistake" in done.stderr
    assert planting.ENOUGH == 0.95
