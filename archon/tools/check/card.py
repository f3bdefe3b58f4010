"""Card of a family: the results of its contracts as a Markdown page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

import archon
from archon.tools.check.contracts import Finding
from archon.tools.check.family import CheckedFamily

MARKS = {True: "✓", False: "✗", None: "–"}


def card(family: CheckedFamily, findings: Sequence[Finding], *, full: bool) -> str:
    """Return the card of a checked family."""
    compared = f"transformers' `{family.reference}`" if family.reference else "nothing: transformers lacks this type"
    rows = [f"| {f.contract} | {MARKS[f.passed]} | {f.text.replace('|', chr(92) + '|')} |" for f in findings]
    versions = f"archon {archon.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    return "\n".join(
        [
            f"# {family.model_type}",
            "",
            f"Written by `archon check-model {family.model_type}{' --full' if full else ''}`: {versions}.",
            "",
            f"- family `{family.spec.name}`, `{family.spec.model_class.__name__}`: {family.description}",
            f"- {family.lines} lines in `{family.file.name}` (limit {family.line_budget})",
            f"- compared with {compared}",
            "",
            "| contract |  | result |",
            "| --- | --- | --- |",
            *rows,
            "",
        ]
    )


def write_card(folder: Path, family: CheckedFamily, findings: Sequence[Finding], *, full: bool) -> Path:
    """Write the card of a family to `folder`; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{family.model_type}.md"
    path.write_text(card(family, findings, full=full), encoding="utf-8")
    return path


def read_card(path: Path) -> dict[str, tuple[str, str]]:
    """Return (mark, text) of each contract on a card, by name."""
    rows = re.findall(r"^\| ([^|]+) \| ([✓✗–]) \| (.*) \|$", path.read_text(encoding="utf-8"), flags=re.M)
    return {contract: (mark, text.replace("\\|", "|")) for contract, mark, text in rows}
