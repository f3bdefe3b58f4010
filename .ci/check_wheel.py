"""Check the content of a wheel: one top-level package, the type marker, every module and recipe."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def expected_files() -> set[str]:
    """Return the wheel path of every source file under archon/ and the packages that it links to."""
    files = {"archon/py.typed"}
    for folder, place in {
        "archon": "archon",
        **{linked: f"archon/{linked}" for linked in ("models", "parallel", "rl")},
    }.items():
        for path in (ROOT / folder).rglob("*"):
            if (
                path.suffix in {".py", ".c", ".yaml", ".tsv", ".html", ".css", ".js"}
                and "__pycache__" not in path.parts
            ):
                files.add(f"{place}/{path.relative_to(ROOT / folder).as_posix()}")
    return files


def check(wheel: Path) -> None:
    """Raise `SystemExit` if files are missing from `wheel` or unexpected."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    packaged = {name for name in names if ".dist-info/" not in name}
    tops = {name.split("/")[0] for name in packaged}
    if tops != {"archon"}:
        raise SystemExit(f"{wheel.name}: top-level packages {sorted(tops)}, expected only archon")
    if missing := sorted(expected_files() - packaged):
        raise SystemExit(f"{wheel.name}: missing files {missing}")
    if extra := sorted(packaged - expected_files()):
        raise SystemExit(f"{wheel.name}: unexpected files {extra}")
    print(f"{wheel.name}: one top-level package, {len(packaged)} files")


if __name__ == "__main__":
    check(Path(sys.argv[1]))
