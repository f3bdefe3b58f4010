"""Rows, record and table of `benchmarks.family_commands`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from archon.tools.bench.origin import ROOT
from archon.tools.check.card import MARKS

RECORD = ROOT / "benchmarks" / "records" / "family_commands.jsonl"
# Heading of the command table on a card, below the table of contracts.
HEADING = "| command |  | result |"


@dataclass(frozen=True)
class Row:
    """Result of one command with one model type."""

    model_type: str
    command: str
    passed: bool
    found: str
    seconds: float


def card_with_commands(card: str, rows: Sequence[Row]) -> str:
    """Return the card with its last table replaced by these commands."""
    above = card.partition(HEADING)[0].rstrip("\n")
    if not rows:
        return f"{above}\n"
    lines = [
        f"| archon {row.command} | {MARKS[row.passed]} | {row.found.replace('|', chr(92) + '|')} |" for row in rows
    ]
    return "\n".join([above, "", HEADING, "| --- | --- | --- |", *lines, ""])


def recorded(record: Path = RECORD) -> list[Row]:
    """Return the rows of a record."""
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    return [Row(*(line[name] for name in Row.__dataclass_fields__)) for line in lines]
