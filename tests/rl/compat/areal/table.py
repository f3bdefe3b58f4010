"""Writes AReaL's half of rl/compat/README.md: every name of `archon.rl.compat.areal.names`.

python -m tests.rl.compat.areal.table
"""

from __future__ import annotations

from pathlib import Path

from archon.rl.compat.areal.names import NAMES, Name

README = Path(__file__).resolve().parents[4] / "rl" / "compat" / "README.md"
BEGIN, END = "<!-- areal: begin -->", "<!-- areal: end -->"


def row(name: Name) -> str:
    """Return a line of the table."""
    written = f"`{name.home}`" if name.home else name.instead if "`" in name.instead else f"`{name.instead}`"
    cells = (f"`{name.name}`", name.status, "" if written == "``" else written, name.note)
    return "| " + " | ".join(cells) + " |"


def table() -> str:
    """Return the tables of all modules."""
    lines: list[str] = []
    modules: dict[str, list[Name]] = {}
    for name in NAMES:
        modules.setdefault(name.path.rpartition(".")[0], []).append(name)
    for module, names in modules.items():
        title = f"`{module}`" if module.startswith("areal") else module
        lines += [f"| {title} | | where it is, or what to write | |", "|---|---|---|---|", *map(row, names), ""]
    return "\n".join(lines)


def page() -> str:
    """Return the page with the table of today."""
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    README.write_text(page(), encoding="utf-8")
