"""JSON record of a measurement: the command, the machine, and the spread of the figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import Field

from archon.schema.config import StrictModel
from archon.tools.bench.origin import Machine, NumericCheck, Spread

FOLDER = Path(__file__).resolve().parent / "records"
PREDICTIONS = "gpu.predictions.json"
"""File of `benchmarks.gpu_predictions`, the only one that is no `Record`."""


class Ratio(StrictModel):
    """archon's number over a peer's: the ratio of medians, and the smallest and largest of a single round."""

    value: float
    min: float
    max: float
    aim: str | None = Field(None, description="such as `>= 1.05` or `0.85 to 1.15`; null where none was set")
    aim_met: bool | None = None


class Record(StrictModel):
    """One case of one benchmark."""

    benchmark: str
    case: str
    command: str
    commit: str = Field(description="`+` at the end: tracked files differed from it")
    date: str
    versions: dict[str, str]
    machine: Machine
    threads: int
    layout: str
    setup: dict[str, Any] = Field(default_factory=dict, description="model, shapes and dtype")
    checks: list[NumericCheck] = Field(default_factory=list)
    sides: dict[str, Spread] = Field(default_factory=dict)
    ratios: dict[str, Ratio] = Field(default_factory=dict)
    profiles: dict[str, dict[str, float]] = Field(
        default_factory=dict,
        description="seconds of a side's step by kind of operator or class of kernel; on a CPU if an aim is missed",
    )
    missing: dict[str, str] = Field(default_factory=dict, description="peers that could not run, and why")
    notes: list[str] = Field(default_factory=list)

    @property
    def path(self) -> Path:
        """Path of the record, one per case; a new record replaces the old one."""
        return FOLDER / f"{self.benchmark}.{self.case}.json"

    def write(self, folder: Path | None = None) -> Path:
        """Write the file, by default below benchmarks/records, and return its path."""
        path = self.path if folder is None else folder / self.path.name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(self.model_dump(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return path


def read_records(folder: Path | None = None) -> list[Record]:
    """Return all records of a folder, by default benchmarks/records, in the order of their file names."""
    return [
        Record.parse(json.loads(path.read_text(encoding="utf-8")), source=path.name)
        for path in sorted((folder or FOLDER).glob("*.json"))
        if path.name != PREDICTIONS
    ]
