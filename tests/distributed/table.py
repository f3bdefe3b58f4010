"""Writes the tables of parallel/README.md: the cases of the gradient matrix with what a run of it found, and the
mistakes it catches.

make test-matrix                       # run the matrix, write the record and the tables (record.py)
python -m tests.distributed.table      # the tables from the record that is there
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.distributed.cases import Case
from tests.distributed.matrix_cases import CASES
from tests.distributed.mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "benchmarks" / "records" / "matrix.jsonl"
README = ROOT / "parallel" / "README.md"
HEAD = ("layout", "model", "options", "dtype", "gradients", "norm", "weights", "guards")


def read_record(path: Path = RECORD) -> dict[str, dict[str, Any]]:
    """The lines of a run by case; of a case that ran twice, the last."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["case"]: line for line in lines}


def options(config: Mapping[str, Any]) -> str:
    """Options as a reader would say them."""
    said = []
    for key, value in config.items():
        if isinstance(value, dict):
            parts = {name: "+".join(part) if isinstance(part, list | tuple) else part for name, part in value.items()}
            value = " ".join(f"{name.replace('_', ' ')} {part}" for name, part in parts.items())
        said.append(key.replace("_", " ") if value is True else f"{key.replace('_', ' ')}: {value}")
    return ", ".join(said)


def case_row(case: Case, line: Mapping[str, Any]) -> list[str]:
    """One case; what the record does not hold of it is left empty."""
    return [
        case.layout.replace("|", "\\|"),
        case.model + (" critic" if case.critic else ""),
        options(case.config),
        case.dtype,
        *(_difference(line.get(name)) for name in ("gradient", "norm", "weights")),
        "; ".join(case.traps),
    ]


def _difference(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [" | ".join(head), " | ".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def matrix(record: Mapping[str, Mapping[str, Any]]) -> str:
    """Every case, and what a run found of it."""
    run = [record[case.name] for case in CASES if case.name in record]
    seconds = sum(line["seconds"] for line in run)
    versions = ", ".join(sorted({line["torch"] for line in run}))
    said = f"{len(CASES)} cases; {len(run)} in the record, {seconds / 60:.0f} minutes, torch {versions}."
    return f"{said}\n\n{table(HEAD, (case_row(case, record.get(case.name, {})) for case in CASES))}"


def mistakes() -> str:
    return table(("mistake", "caught by"), ([each.mistake, f"`{each.case}`"] for each in MUTATIONS))


def with_tables(text: str, record: Mapping[str, Mapping[str, Any]]) -> str:
    """`text` with the tables between their markers. Raises ValueError where it has none."""
    for name, body in (("matrix", matrix(record)), ("mistakes", mistakes())):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"the page has no place for the table: expected {begin} and {end}")
        text = f"{before}{begin}\n{body}\n{end}{after}"
    return text


def write_page() -> None:
    """Write the tables of parallel/README.md from the record."""
    README.write_text(with_tables(README.read_text(encoding="utf-8"), read_record()), encoding="utf-8")


if __name__ == "__main__":
    write_page()
