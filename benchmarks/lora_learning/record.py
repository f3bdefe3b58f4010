"""Record lines of runs and later comparisons of their exports."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def newest(lines: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the newest line of each run, merged with its export comparison from a later line."""
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        found[line["run"]] = line if "code" in line else found.get(line["run"], {}) | {"exported": line["exported"]}
    return found


def read_record(path: Path) -> dict[str, dict[str, Any]]:
    """Return `newest` of a file."""
    return newest(map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else []))


def append(record: Path, line: dict[str, Any]) -> None:
    """Add a line to a record."""
    with record.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
