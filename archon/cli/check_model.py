"""`archon check-model TARGET`: run the contract tests of a model family and write its card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

SETTINGS: dict[str, Any] = {
    "name": "check-model",
    "help": "Run the contract tests of a model family.\n\n"
    "Tests parity with transformers, config fields, checkpoints, document isolation, generation and two-rank layouts "
    "on small random configurations. Prints one line per failed contract and then exits with 1.",
}


def command(
    target: Annotated[str, typer.Argument(metavar="TYPE|MODULE|FILE", help="model type, or a family's module or file")],
    full: Annotated[bool, typer.Option("--full", help="test every configuration and layout (minutes)")] = False,
    reference: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="equivalent model type in transformers; default: the same name"),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="CONTRACT", help="run only this contract; repeatable")
    ] = None,
    cards: Annotated[Path | None, typer.Option(metavar="FOLDER", help="write the card TYPE.md to this folder")] = None,
) -> None:
    """Run the contract tests of a model family."""
    import transformers

    from archon.tools.check.card import MARKS, write_card
    from archon.tools.check.contracts import check_family
    from archon.tools.check.family import load_families

    transformers.logging.set_verbosity_error()  # it warns about the unusual sizes
    transformers.logging.disable_progress_bar()
    broken = []
    for family in load_families(target, reference):
        print(f"{family.model_type}: {family.lines} lines in {family.file.name}", flush=True)
        findings = []
        for finding in check_family(family, full=full, only=only or ()):
            findings.append(finding)
            mark, seconds = MARKS[finding.passed], f"{finding.seconds:.0f} s"
            print(f"  {mark} {finding.contract:<14} {finding.text}  ({seconds})", flush=True)
        broken += [f"{family.model_type}: {f.contract}: {f.text}" for f in findings if f.passed is False]
        if cards is not None:
            print(f"  card: {write_card(cards, family, findings, full=full)}")
    if broken:
        typer.echo("\n".join(f"archon: {line}" for line in broken), err=True)
        raise typer.Exit(1)
