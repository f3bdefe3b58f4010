"""The documentation has every public name, command and field. `make docs` checks its links."""

from __future__ import annotations

import importlib
import pkgutil
import re
import shlex
from collections.abc import Iterator

import pytest
import typer

import archon
from archon.cli import train
from archon.cli.app import app
from archon.cli.config import import_schema, leaves
from archon.cli.examples import EXAMPLES
from docs import hooks
from tests.test_readme import markdown_pages

INTERNAL = {
    "archon.cli",  # commands, not an API
    "archon.rl.compat.areal",  # moving/names.md lists its names
    "archon.serve.training",  # started by a command
}


def packages() -> Iterator[str]:
    """Packages of archon with public names."""
    yield "archon"
    for module in pkgutil.walk_packages(archon.__path__, "archon."):
        if module.ispkg and getattr(importlib.import_module(module.name), "__all__", ()):
            yield module.name


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return dict(hooks.reference_pages())


def test_every_public_name_has_a_place_in_the_reference(pages: dict[str, str]) -> None:
    assert set(packages()) - INTERNAL <= set(hooks.PACKAGES)
    everything = "".join(text for uri, text in pages.items() if uri.startswith("reference/api/"))
    documented = re.findall(r"^::: (\S+)$", everything, re.MULTILINE)
    assert len(documented) == len(set(documented)) > 100
    for package in hooks.PACKAGES:
        assert set(hooks.public_definitions(package).values()) <= set(documented), package


@pytest.mark.parametrize("command", train.RUNS)
def test_every_field_has_a_row(pages: dict[str, str], command: str) -> None:
    page = pages[f"reference/config-{command}.md"]
    rows = re.findall(r"^\| `(\S+?)(?: \(required\)| = .*)?` \| ", page, re.MULTILINE)
    assert set(leaves(import_schema(train.RUNS[command].config))) <= set(rows)


def test_every_command_and_route_is_described(pages: dict[str, str]) -> None:
    commands = re.findall(r"^## archon (\S+)$", pages["reference/commands.md"], re.MULTILINE)
    assert set(commands) == set(EXAMPLES)
    assert "`POST /v1/chat/completions`" in pages["reference/http.md"]
    assert "None" not in pages["reference/http.md"]


def commands() -> Iterator[list[str]]:
    """The arguments of every command of archon in the shell blocks of the pages, and in the examples of `--help`."""
    yield from (shlex.split(example)[1:] for examples in EXAMPLES.values() for example in examples)
    for page in markdown_pages():
        for block in re.findall(r"^```(?:bash|sh)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            lines = iter(re.sub(r"(^|\s)#.*$", "", block, flags=re.MULTILINE).replace("\\\n", " ").splitlines())
            for line in lines:
                while line.count("'") % 2:  # a quoted value over several lines
                    line += next(lines)
                words = shlex.split(line)
                if "archon" in words[:5] and len(words) > words.index("archon") + 1:
                    yield words[words.index("archon") + 1 :]


COMMANDS = {" ".join(words): words for words in commands()}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_every_command_of_the_pages_exists_with_its_options_and_keys(words: list[str]) -> None:
    group = typer.main.get_command(app)
    if words[0] == "launch":
        words = words[next(i for i, word in enumerate(words) if i and word in group.commands) :]
    name, *arguments = [word for word in words if word not in ("&", "--help")]
    context = group.commands[name].make_context(name, arguments)  # parses, and raises for unknown options
    if name in train.RUNS:
        keys = {f"{leaf}." for leaf in leaves(import_schema(train.RUNS[name].config))}
        for override in context.params["overrides"] or []:
            key = f"{override.partition('=')[0]}."
            assert any(key.startswith(known) or known.startswith(key) for known in keys), override
