"""The tables of families in the READMEs, their cards and the record of the sweep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from archon.tools.bench.origin import ROOT
from archon.tools.check.card import read_card
from archon.tools.check.contracts import CONTRACTS
from benchmarks import families
from benchmarks.families import CARDS, checked_families, lines_report, pages, with_table

RECORD = ROOT / "benchmarks" / "records" / "families.jsonl"


def test_the_readmes_say_what_specs_and_cards_say() -> None:
    for path, text in pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run python -m benchmarks.families --tables"


def contracts_on(card: Path) -> dict[str, tuple[str, str]]:
    """Those of a card, without its commands (`test_family_commands.py`); {} where the family was not checked yet."""
    return {name: found for name, found in read_card(card).items() if not name.startswith("archon ")}


def test_every_card_is_of_a_family_and_has_no_broken_contract() -> None:
    types = {family.model_type for family in checked_families()}
    cards = sorted(CARDS.glob("*.md"))
    assert cards
    for path in cards:
        found = contracts_on(path)
        assert path.stem in types, f"{path} is of no family"
        assert not found or list(found) == list(CONTRACTS), f"{path}: run make test-models"
        assert [name for name, (mark, _) in found.items() if mark == "✗"] == []


def test_the_cards_say_what_the_record_says() -> None:
    lines = [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]
    assert {line["model_type"] for line in lines} == {path.stem for path in CARDS.glob("*.md") if contracts_on(path)}
    for line in lines:
        card = contracts_on(CARDS / f"{line['model_type']}.md")
        assert {name: contract["found"] for name, contract in line["contracts"].items()} == {
            name: text for name, (_, text) in card.items()
        }


def test_every_family_keeps_to_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = checked_families()
    text, fine = lines_report(checked)
    assert fine, text
    monkeypatch.setattr("archon.tools.check.family.LINE_BUDGETS", (20, 30, 40))
    text, fine = lines_report(checked)
    assert not fine and "llama.py" in text


def test_a_family_without_a_card_is_said_to_be_unchecked(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "CARDS", tmp_path)
    [llama] = [family for family in checked_families() if family.model_type == "llama"]
    assert families.zoo_table([llama]).count("not checked yet") == 3


def test_a_page_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for the table"):
        with_table("# a page", "| a |")
