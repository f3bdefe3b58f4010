"""Checks what a wheel holds: one top-level package, the type marker, and every module and recipe of the four rooms."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def expected_files() -> set[str]:
    """Returns every file git would publish under archon/ and the rooms it links to, by its place in the wheel."""
    found = {"archon/py.typed"}
    for folder, place in {
        "archon": "archon",
        **{room: f"archon/{room}" for room in ("models", "parallel", "rl")},
    }.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".c", ".yaml", ".html", ".css", ".js"} and "__pycache__" not in path.parts:
                found.add(f"{place}/{path.relative_to(ROOT / folder).as_posix()}")
    return found


def check(wheel: Path) -> None:
    """Raise `SystemExit` with what is wrong with `wheel`."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    packaged = {name for name in names if ".dist-info/" not in name}
    tops = {name.split("/")[0] for name in packaged}
    if tops != {"archon"}:
        raise SystemExit(f"{wheel.name}: top-level packages {sorted(tops)}, expected only archon")
    if missing := sorted(expected_files() - packaged):
        raise SystemExit(f"{wheel.name}: lacks {missing}")
    if extra := sorted(packaged - expected_files()):
        raise SystemExit(f"{wheel.name}: holds {extra}, which the rooms do not")
    print(f"{wheel.name}: one top-level package, {len(packaged)} files")


if __name__ == "__main__":
    check(Path(sys.argv[1]))
