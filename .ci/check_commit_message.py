"""Commit-message hook: Conventional Commits with this project's scopes.

    feat(rl): skip groups whose rewards are all equal

    They add nothing to the gradient, yet cost a forward and a backward pass.

The body says why; feat, fix and perf commits need one. A subject without a scope gets the scope of the staged paths, if
they have one in common. Installed by `pre-commit install --hook-type commit-msg`; also
`python .ci/check_commit_message.py FILE`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

TYPES = ("feat", "fix", "perf", "refactor", "test", "docs", "style", "build", "ci", "chore", "gov", "revert")
SCOPES = ("engine", "models", "parallel", "rl", "cli", "bench", "ci", "docs", "tests")
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("archon", "models", "parallel", "rl", "tests")
NEEDS_A_BODY = ("feat", "fix", "perf")
SUBJECT_LENGTH = 100
# A folder of archon/ is a scope itself.
SCOPE_OF_FOLDER = {name: name for name in ("models", "parallel", "rl", "tests")} | {"benchmarks": "bench", ".ci": "ci"}

SUBJECT = re.compile(r"(?P<type>[a-z]+)(\((?P<scope>[^)]*)\))?!?: (?P<text>\S.*)")
WRITTEN_BY_GIT = re.compile(r"(Merge|Revert|fixup!|squash!|amend!) ?\S")


def folders() -> set[str]:
    """Return the names of the packages' folders, such as `checkpoint` of archon/checkpoint."""
    children = (child for package in PACKAGES for child in (ROOT / package).iterdir())
    return {child.name for child in children if child.is_dir() and child.name[0] not in "._"}


def scope_of(path: str) -> str | None:
    """Return the scope of a file, such as `checkpoint` of archon/checkpoint/saver.py, or None."""
    parts = Path(path).parts
    if parts[0] == "archon" and len(parts) > 2:
        return parts[1]
    return SCOPE_OF_FOLDER.get(parts[0]) or ("docs" if path.endswith(".md") else None)


def inferred_scope(paths: Iterable[str]) -> str | None:
    """Return the scope that the changed files have in common, or None; tests and docs count if alone."""
    scopes = {scope_of(path) for path in paths}
    primary = scopes - {"tests", "docs"} or scopes
    return primary.pop() if len(primary) == 1 else None


def with_scope(message: str, paths: Iterable[str]) -> str:
    """Return the message with the inferred scope, if its subject has none."""
    lines = message.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if not line.strip() or line.startswith("#"):
            continue
        match, scope = SUBJECT.fullmatch(line.rstrip("\n")), inferred_scope(paths)
        if match and match["scope"] is None and scope and scope != match["type"]:
            lines[number] = f"{match['type']}({scope}){line.removeprefix(match['type'])}"
        break
    return "".join(lines)


def problem(message: str) -> str | None:
    """Return the error of a commit message in one line, or None."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    while lines and not lines[0].strip():
        lines.pop(0)
    if not lines:
        return "the message is empty"
    subject = lines[0]
    if WRITTEN_BY_GIT.match(subject):
        return None
    match = SUBJECT.fullmatch(subject)
    if not match:
        return f"{subject!r} does not have the form `type(scope): description`"
    if match["type"] not in TYPES:
        return f"unknown type {match['type']!r}; one of {', '.join(TYPES)}"
    if match["scope"] is not None and match["scope"] not in {*SCOPES, *folders()}:
        return f"unknown scope {match['scope']!r}; one of {', '.join(SCOPES)}, or a folder of {', '.join(PACKAGES)}"
    if len(subject) > SUBJECT_LENGTH:
        return f"the subject {subject!r} has {len(subject)} characters, at most {SUBJECT_LENGTH}"
    if subject.endswith("."):
        return "the subject ends with a full stop"
    if len(lines) > 1 and lines[1].strip():
        return "insert an empty line between subject and body"
    if match["type"] in NEEDS_A_BODY and not any(line.strip() for line in lines[2:]):
        return f"a commit of type {match['type']} needs a body that says why"
    return None


if __name__ == "__main__":
    file = Path(sys.argv[1])
    text = file.read_text(encoding="utf-8")
    names = ["git", "-c", "core.quotePath=false", "diff", "--cached", "--name-only", "--no-renames"]
    staged = subprocess.run(names, capture_output=True, text=True).stdout.splitlines()
    if error := problem(scoped := with_scope(text, staged)):
        sys.exit(f"commit message: {error}")
    if scoped != text:
        file.write_text(scoped, encoding="utf-8")
