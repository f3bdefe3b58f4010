"""Every command works with every family: a sample here, all of them in the record and on the cards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from archon.tools.check.family import CheckedFamily
from archon.tools.check.oracle import ContractError
from benchmarks.command_rows import RECORD, Row, card_with_commands, recorded
from benchmarks.families import CARDS, checked_families
from benchmarks.family_commands import COMMANDS, check_commands, make_subject, run

FAMILIES = {family.model_type: family for family in checked_families()}


def failed(family: CheckedFamily, *only: str) -> list[Row]:
    rows = [*check_commands(family, only)]
    assert [row.command for row in rows] == [*only]
    return [row for row in rows if not row.passed]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_inspect_and_plan_know_every_layer(model_type: str) -> None:
    assert failed(FAMILIES[model_type], "inspect", "plan") == []


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_5"])
def test_generate_and_convert_of_sinks_and_of_a_composite_checkpoint(model_type: str) -> None:
    conversions = [name for name in COMMANDS if name.startswith("convert")]
    assert failed(FAMILIES[model_type], "generate", *conversions) == []


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_next"])
def test_every_command_of_latent_attention_and_of_delta_nets(model_type: str) -> None:
    assert failed(FAMILIES[model_type], *COMMANDS) == []


def test_what_fails_is_a_row_and_the_other_commands_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(subject: object) -> str:
        raise ContractError("it says\n12")

    monkeypatch.setitem(COMMANDS, "plan", fail)
    [row] = failed(FAMILIES["llama"], "plan", "inspect")
    assert (row.command, row.found) == ("plan", "it says 12")


def test_a_command_that_ends_badly_is_named_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"archon inspect exits with 2 and says: archon: .*no_such"):
        run("inspect", tmp_path / "no_such")


def test_another_answer_than_that_of_transformers_is_told(tmp_path: Path) -> None:
    subject = make_subject(FAMILIES["llama"], tmp_path)
    object.__setattr__(subject, "answer", "something else")
    with pytest.raises(ContractError, match=r"it answers .*, transformers 'something else'"):
        COMMANDS["generate"](subject)


def test_the_record_has_every_command_of_its_families_and_none_that_failed() -> None:
    rows = recorded()
    types = {row.model_type for row in rows}
    assert len(types) >= 22 and types <= FAMILIES.keys()
    assert {(row.model_type, row.command) for row in rows} == {(name, each) for name in types for each in COMMANDS}
    assert [row for row in rows if not row.passed] == []
    for line in RECORD.read_text(encoding="utf-8").splitlines():
        assert not json.loads(line)["commit"].endswith("+"), "a record belongs to a commit"


def test_the_cards_show_the_record() -> None:
    rows = recorded()
    for model_type in sorted({row.model_type for row in rows}):
        card = (CARDS / f"{model_type}.md").read_text(encoding="utf-8")
        assert card == card_with_commands(card, [row for row in rows if row.model_type == model_type])


def test_the_commands_of_a_card_are_replaced_and_what_stands_above_stays() -> None:
    rows = [Row("llama", "plan", True, "d2 | d4", 1.0), Row("llama", "rl", False, "no", 2.0)]
    card = card_with_commands("# llama\n\n| a table |\n", rows)
    assert card.endswith("| archon plan | ✓ | d2 \\| d4 |\n| archon rl | ✗ | no |\n")
    assert card_with_commands(card, rows) == card
    assert card_with_commands(card, []) == "# llama\n\n| a table |\n"
