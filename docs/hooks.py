"""Pages that MkDocs makes from the code and from guides next to it, and links that also work in the repository."""

from __future__ import annotations

import importlib
import os
import re
import types
from collections.abc import Iterator
from pathlib import Path

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from archon.cli import train
from archon.cli.app import app
from archon.cli.config import field_lines, import_schema

ROOT = Path(__file__).resolve().parents[1]
GUIDES = {
    "ARCHITECTURE.md": "design/architecture.md",
    "CHANGELOG.md": "design/changes.md",
    "CONTRIBUTING.md": "design/contributing.md",
    "SECURITY.md": "design/security.md",
    "archon/remote/README.md": "design/remote.md",
    "benchmarks/PLANNER.md": "performance/planner.md",
    "benchmarks/README.md": "performance/benchmarks.md",
    "examples/README.md": "examples.md",
    "models/README.md": "models/index.md",
    "models/RELEASED.md": "models/released.md",
    "parallel/README.md": "layouts/index.md",
    "rl/compat/README.md": "moving/names.md",
}
"""Pages of the site by their files outside docs/."""
PACKAGES = (
    "archon",
    "archon.engine",
    "archon.models",
    "archon.parallel",
    "archon.checkpoint.hf_io",
    "archon.data",
    "archon.generation",
    "archon.training",
    "archon.rl",
    "archon.rl.algorithms",
    "archon.rl.environments",
    "archon.rl.rewards",
    "archon.rl.sandbox",
    "archon.rl.workflows",
    "archon.remote",
    "archon.serve",
    "archon.tools.bench",
    "archon.tools.report",
)
"""Modules whose `__all__` is the public API."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the guides outside docs/ and the generated reference."""
    cards = {f"models/cards/{card.name}": f"models/cards/{card.name}" for card in ROOT.glob("models/cards/*.md")}
    for path, uri in (GUIDES | cards).items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for path in ROOT.glob("benchmarks/figures/*.svg"):
        files.append(File.generated(config, f"performance/figures/{path.name}", abs_src_path=str(path)))
    for uri, text in reference_pages():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links to files of the repository by links to their pages, or by their paths if they have none."""
    if page.file.src_uri.startswith("reference/"):
        return markdown
    uris = {Path(file.abs_src_path).resolve(): file.src_uri for file in files if file.abs_src_path}
    source = Path(page.file.abs_src_path or "").resolve()

    def replaced(link: re.Match[str]) -> str:
        mark, text, path, fragment = link[1], link[2], link[3], link[4] or ""
        if not path or re.match(r"[a-z]+:", path):
            return link[0]
        target = (source.parent / path).resolve()
        if target in uris:
            return f"{mark}[{text}]({os.path.relpath(uris[target], os.path.dirname(page.file.src_uri))}{fragment})"
        if not target.exists():
            raise PluginError(f"{source}: the link to {path} leads to no file")
        return text if text.startswith("`") else f"{text} (`{target.relative_to(ROOT)}`)"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]+)?\)", replaced, markdown)


def reference_pages() -> Iterator[tuple[str, str]]:
    """Yield path and Markdown of each page of the reference."""
    index = ["# Reference", "", "- [Commands](commands.md)", "- [HTTP routes](http.md)"]
    index += [f"- [Configuration of `archon {name}`](config-{name}.md)" for name in train.RUNS]
    index += ["", "## Python", "", "| module | names |", "|---|---|"]
    pages: dict[str, str] = {}  # by the dotted path of a definition; a name that several modules export has one page
    for package in PACKAGES:
        definitions = public_definitions(package)
        new = [path for path in definitions.values() if pages.setdefault(path, package) == package]
        links = ", ".join(f"[`{name}`](api/{pages[path]}.md#{path})" for name, path in definitions.items())
        index.append(f"| `{package}` | {links} |")
        heading = f"# {package}\n\nImport these names from `{package}`.\n\n"
        yield f"reference/api/{package}.md", heading + "".join(f"::: {path}\n\n" for path in dict.fromkeys(new))
    yield "reference/index.md", "\n".join(index) + "\n"
    yield "reference/commands.md", "\n".join(commands())
    for name, run in train.RUNS.items():
        rows = "\n".join(config_table(field_lines(import_schema(run.config))))
        yield f"reference/config-{name}.md", f"# Configuration of archon {name}\n\n{rows}\n"
    yield "reference/http.md", "\n".join(http_routes())


def public_definitions(package: str) -> dict[str, str]:
    """Return the dotted paths of definitions by public name, of a module's classes and functions."""
    module = importlib.import_module(package)
    values = {name: getattr(module, name) for name in module.__all__}
    return {
        name: f"{value.__module__}.{value.__qualname__}"
        for name, value in values.items()
        if isinstance(value, type | types.FunctionType)
    }


def commands() -> Iterator[str]:
    """Yield the help of every command; the configuration of training commands has pages of its own."""
    yield "# Commands\n"
    group = typer.main.get_command(app)
    for name, command in group.commands.items():
        context = type(group).context_class(
            command, info_name=name, parent=type(group).context_class(group, info_name="archon")
        )
        text = command.get_help(context)
        if name in train.RUNS:
            text = text.partition("\n\nConfiguration (")[0]
        yield f"## archon {name}\n\n```text\n{text}\n```\n"
        if name in train.RUNS:
            yield f"[Configuration of `archon {name}`](config-{name}.md)\n"


def config_table(lines: Iterator[str]) -> Iterator[str]:
    """Turn the lines of `field_lines` into tables, one for each section that is off by default."""
    header = "| field and default | type and meaning |\n|---|---|"
    yield header
    key = ""
    for line in "\n".join(lines).splitlines():
        if line.startswith("      "):
            kind, text = re.fullmatch(r"(\[.*?\](?= |$))? ?(.*)", line.strip()).groups()
            description = re.sub(r"([|\[\]<*_])", r"\\\1", text)
            yield f"| `{key}` | {f'`{kind[1:-1]}` ' if kind else ''}{description} |"
        elif line.startswith("  same fields as "):
            yield f"| {line.strip()} | |"
        elif line.startswith("  "):
            key = line.strip()
        elif line:
            yield f"\n## {line.removesuffix(':').removesuffix(', if set')}\n\n{header}"


def http_routes() -> Iterator[str]:
    """Yield the routes of `archon serve` from its OpenAPI document."""
    from archon.serve.routes import app as routes

    yield "# HTTP routes\n\nThe routes of `archon serve`. A running server describes their fields at `/openapi.json`.\n"
    yield "| route | |\n|---|---|"
    for path, methods in routes.openapi()["paths"].items():
        for method, route in methods.items():
            text = str(route.get("description") or route.get("summary")).replace("\n", " ").replace("|", "\\|")
            yield f"| `{method.upper()} {path}` | {text} |"
