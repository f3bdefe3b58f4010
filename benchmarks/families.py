"""Check every contract of every built-in family, and write the cards and the tables of families in the READMEs.

    python -m benchmarks.families --record benchmarks/records/families.jsonl     # all, in full: half an hour on 2 cores
    python -m benchmarks.families --record benchmarks/records/families.jsonl --only llama
    python -m benchmarks.families --tables                                       # only the tables, from specs and cards
    python -m benchmarks.families --lines                                        # lines of each file, and its budget

A line of the record is one model type with the result and the seconds of each contract; `--only` keeps the other lines.
The exit code is 1 if a contract is broken or a file is too long.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from archon.models.released import released_models
from archon.models.spec import FAMILIES, get_model_spec
from archon.tools.bench.origin import ROOT, commit, versions
from archon.tools.check.card import MARKS, read_card, write_card
from archon.tools.check.contracts import Finding, check_family
from archon.tools.check.family import CheckedFamily, load_families
from benchmarks.command_rows import card_with_commands, recorded
from benchmarks.harness import say

CARDS = ROOT / "models" / "cards"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"


def checked_families() -> list[CheckedFamily]:
    """Return the model types of the built-in families, by the families' names; a composite one is with its decoder."""
    specs = {name: get_model_spec(name) for name in FAMILIES}
    types = {
        name: sorted({*spec.supported_model_types, *spec.model_args_class.composite_types})
        for name, spec in specs.items()
    }
    return [load_families(model_type)[0] for name in sorted(types) for model_type in types[name]]


def described(family: CheckedFamily) -> tuple[str, str]:
    """Return the display name and the description of a family, from the first sentence of its file."""
    name, _, what = family.description.partition(": ")
    return re.sub(r" \(.*", "", name), re.sub(r" \([^)]*arXiv[^)]*\)", "", what).rstrip(".")


def card_of(family: CheckedFamily) -> dict[str, tuple[str, str]]:
    """Return the result of each contract on the card of a family; {} without a card."""
    path = CARDS / f"{family.model_type}.md"
    return read_card(path) if path.exists() else {}


def zoo_table(families: Sequence[CheckedFamily]) -> str:
    """Return the family table of models/README.md: descriptions, and proven properties from the cards."""
    rows = [
        "| family | `model_type` and card | what it is | against transformers | greedy tokens | two ranks |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for family in families:
        card = card_of(family)
        found = [card.get(name, ("", "not checked yet")) for name in ("parity", "generation", "two ranks")]
        proven = " | ".join((f"✗ {text}" if mark == "✗" else text).replace("|", r"\|") for mark, text in found)
        name, what = described(family)
        link = f"[{family.model_type}](cards/{family.model_type}.md)" if card else f"`{family.model_type}`"
        rows.append(f"| [{name}]({family.file.name}) | {link} | {what} | {proven} |")
    return "\n".join(rows)


def family_names(families: Sequence[CheckedFamily]) -> str:
    """Return the names of all families in one paragraph, for the top-level README."""
    names = dict.fromkeys(described(family)[0].removesuffix("'s text decoder") for family in families)
    return textwrap.fill(", ".join(names) + ".", 120)


def pages() -> dict[Path, str]:
    """Return the pages that this module writes, by path."""
    families = checked_families()
    tables = {ROOT / "README.md": family_names(families), ROOT / "models" / "README.md": zoo_table(families)}
    texts = {path: with_table(path.read_text(encoding="utf-8"), table) for path, table in tables.items()}
    return texts | {ROOT / "models" / "RELEASED.md": released_page()}


def released_page() -> str:
    """Return the page that lists released models with their model type and its status."""
    rows = [
        "# Which model is which family",
        "",
        (
            "`archon models NAME` searches this table. `python -m benchmarks.families --tables` writes it from "
            "[released.tsv](released.tsv). A model that is not listed has its `model_type` in its `config.json`."
        ),
        "",
        "| model | `model_type` | status |",
        "| --- | --- | --- |",
    ]
    for model in released_models():
        status = model.status
        if status == "supported":
            card = CARDS / f"{model.model_type}.md"
            status = f"[supported](cards/{card.name})" if card.exists() else status
        rows.append(f"| {model.name} | `{model.model_type}` | {status} |")
    return "\n".join(rows) + "\n"


def with_table(text: str, table: str) -> str:
    """Return a page with the table between its markers.

    Raises:
        ValueError: the page has no markers.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no place for the table: expected {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def lines_report(families: Sequence[CheckedFamily]) -> tuple[str, bool]:
    """Return the lines of each family's file with its budget, and whether all keep to it."""
    rows = {family.file.name: (family.lines, family.line_budget) for family in families}
    text = "\n".join(f"{file:<20} {lines:>4} of {budget}" for file, (lines, budget) in rows.items())
    return text, all(lines <= budget for lines, budget in rows.values())


def record_line(family: CheckedFamily, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the line of the record for a checked model type."""
    contracts = {f.contract: {"passed": f.passed, "found": f.text, "seconds": round(f.seconds, 1)} for f in findings}
    kept = {"model_type": family.model_type, "family": family.spec.name, "reference": family.reference}
    return kept | {"contracts": contracts, "commit": commit(), "versions": versions()}


def sweep(families: Sequence[CheckedFamily], record: Path) -> bool:
    """Check the families in full; write their cards and lines of the record. Returns whether all contracts hold."""
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    kept = {line["model_type"]: line for line in lines}
    held = True
    for family in families:
        findings = []
        for finding in check_family(family, full=True):
            findings.append(finding)
            say(f"{family.model_type:<16} {MARKS[finding.passed]} {finding.contract}: {finding.text}")
            held &= finding.passed is not False
        card = write_card(CARDS, family, findings, full=True)
        rows = [row for row in recorded() if row.model_type == family.model_type]
        card.write_text(card_with_commands(card.read_text(encoding="utf-8"), rows), encoding="utf-8")
        kept[family.model_type] = record_line(family, findings)
        record.write_text("".join(json.dumps(kept[name]) + "\n" for name in sorted(kept)))
    return held


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="check the families and write this record")
    parser.add_argument("--only", action="append", metavar="TYPE", help="this model type alone; may be repeated")
    parser.add_argument("--tables", action="store_true", help="write the tables of the READMEs")
    parser.add_argument("--lines", action="store_true", help="print the lines of each family's file")
    chosen = parser.parse_args(arguments)
    families = checked_families()
    if chosen.only and (unknown := {*chosen.only} - {family.model_type for family in families}):
        parser.error(f"no built-in family has the model type {sorted(unknown)[0]!r}")
    fine = True
    if chosen.lines:
        text, fine = lines_report(families)
        print(text)
    if chosen.record is not None:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        fine &= sweep([f for f in families if not chosen.only or f.model_type in chosen.only], chosen.record)
    if chosen.tables or chosen.record is not None:
        for path, text in pages().items():
            path.write_text(text, encoding="utf-8")
    if not fine:
        sys.exit(1)


if __name__ == "__main__":
    main()
