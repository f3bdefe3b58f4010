"""The catalog of planted mistakes fits the source, and its record says what it claims to."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from archon.tools.bench.origin import ROOT
from tests.mutants.__main__ import ENOUGH
from tests.mutants.catalog import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.planting import Outcome, copy_tree, run_tests, tracked_files
from tests.mutants.record import Record, row_of, summary_of

RECORD = ROOT / "benchmarks" / "records" / "mutants.jsonl"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_mistake_stands_once_parses_and_changes_the_program(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    program = compiled_c if mutant.file.endswith(".c") else parsed_python
    assert program(mutant.applied(text)) != program(text)


def parsed_python(text: str) -> str:
    return ast.dump(ast.parse(text))


def compiled_c(text: str) -> str:
    """Return the assembly; a text that is no program raises CalledProcessError."""
    command = ["cc", "-fopenmp", "-S", "-x", "c", "-o", "-", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


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


def test_the_record_has_a_row_of_each_mutant_as_it_is_and_says_at_which_commit() -> None:
    *rows, last = [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]
    patches = {mutant.name: (mutant.file, mutant.patch) for mutant in MUTANTS}
    recorded = {row["mutant"]: (row["file"], row["patch"]) for row in rows}
    assert recorded == patches, f"commit, then python -m tests.mutants --missing --record {RECORD.relative_to(ROOT)}"
    summary = last["summary"]
    assert summary_of(rows).items() <= summary.items()
    assert summary["share"] >= ENOUGH
    for commit in {row["commit"] for row in rows} | {summary["last_run"]["commit"]}:
        assert not commit.endswith("+"), "a record belongs to a commit"


def test_a_record_replaces_the_rows_of_a_run_and_drops_edits_that_are_no_longer_in_the_catalog(tmp_path: Path) -> None:
    first, second, third = (Mutant(name, "x.py", "a = 1\n", "a = 2\n", ("tests/test_x.py",)) for name in "abc")
    path = tmp_path / "record.jsonl"
    record = Record(path, (first, second, third), {"commit": "1"})
    for mutant in (third, first, second):
        record.put(row_of(mutant, Outcome("tests/test_x.py::test_x", 1.0), "1"))
    moved = replace(second, replacement="a = 3\n")
    after = Record(path, (first, moved), {"commit": "2"})
    assert after.missing() == [moved]
    after.put(row_of(moved, Outcome(None, 2.5), "2"))
    *rows, last = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["mutant"], row["commit"], row["caught"]) for row in rows] == [("a", "1", True), ("b", "2", False)]
    assert last["summary"] == {
        "mutants": 2,
        "caught": 1,
        "share": 0.5,
        "survivors": ["b"],
        "seconds": 3.5,
        "last_run": {"commit": "2"},
    }
    assert Record(path, (first, replace(moved, file="y.py")), {}).missing() == [replace(moved, file="y.py")]


def test_a_snippet_that_stands_there_twice_or_not_at_all_is_refused() -> None:
    mutant = Mutant("both", "x.py", "a = 1\n", "a = 2\n", ("tests/test_x.py",))
    for text, times in (("", 0), ("a = 1\na = 1\n", 2)):
        with pytest.raises(ValueError, match=f"both: its snippet occurs {times} times in x.py, expected once"):
            mutant.applied(text)


def test_a_copy_of_the_tree_has_its_links_and_nothing_that_git_does_not_know(tmp_path: Path) -> None:
    files = tracked_files()
    copy_tree(files, tmp_path)
    assert (tmp_path / "archon" / "models").is_symlink()
    assert (tmp_path / "archon" / "models" / "base.py").read_text() == (ROOT / "models" / "base.py").read_text()
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


@pytest.mark.slow
def test_tests_that_pass_have_noticed_nothing(tmp_path: Path) -> None:
    outcome = sample(tmp_path)
    assert (outcome.failed, outcome.caught, outcome.error) == (None, False, None)


@pytest.mark.slow
def test_the_first_test_that_fails_is_named(tmp_path: Path) -> None:
    outcome = sample(tmp_path, change=("return a + b", "return a * a - b"))
    assert outcome.failed == "tests/test_sample.py::test_fine" and outcome.caught
    row = row_of(MUTANTS[0], outcome, "abc")
    assert row["by"] == outcome.failed and row["caught"] and row["commit"] == "abc"


@pytest.mark.slow
def test_a_source_that_cannot_be_imported_is_an_error_and_no_success(tmp_path: Path) -> None:
    outcome = sample(tmp_path, change=("import time", "import no_such_module"))
    assert not outcome.caught and outcome.error is not None and "no_such_module" in outcome.error


@pytest.mark.slow
def test_a_hang_counts_as_caught_and_says_so(tmp_path: Path) -> None:
    outcome = sample(tmp_path, seconds=60.0, timeout=10.0)
    assert outcome.caught and outcome.failed is None
    assert row_of(MUTANTS[0], outcome, "abc")["by"] == "time-out after 10 s"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--only", "no such mistake"], "no mutant's name or file holds no such mistake"),
        (["--missing"], "--missing needs --record FILE"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(options: list[str], complaint: str) -> None:
    done = subprocess.run([sys.executable, "-m", "tests.mutants", *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and complaint in done.stderr
