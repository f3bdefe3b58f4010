"""`archon check-model TARGET`: runs every contract of a family and writes its card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

SETTINGS: dict[str, Any] = {
    "name": "check-model",
    "help": "Run every contract of a model family.\n\n"
    "Parity with transformers, config fields, checkpoints, isolation of documents, generation and layouts of two "
    "ranks, on small random configurations. Exits with 1 if a contract is broken, after one line for each.",
}


def command(
    target: Annotated[
        str, typer.Argument(metavar="TYPE|MODULE|FILE", help="model type, or the module or file of a family")
    ],
    full: Annotated[bool, typer.Option("--full", help="every configuration and layout, in minutes")] = False,
    reference: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="model type of transformers that computes the same; default: its own"),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="CONTRACT", help="this contract alone; may be repeated")
    ] = None,
    cards: Annotated[Path | None, typer.Option(metavar="FOLDER", help="write the card TYPE.md there")] = None,
) -> None:
    import transformers

    from archon.tools.check.card import MARKS, write_card
    from archon.tools.check.contracts import check_family
    from archon.tools.check.family import load_families

    transformers.logging.set_verbosity_error()  # it warns of sizes that no published model has
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
