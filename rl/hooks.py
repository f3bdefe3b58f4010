"""Hooks by which other packages teach `archon.rl` their workflow classes and dotted paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Resolver = Callable[[Any, Mapping[str, Any]], tuple[Any, Mapping[str, Any]]]
"""(workflow or its name, constructor arguments) -> the same, resolved; unchanged if the resolver does not know it."""

_RESOLVERS: list[Resolver] = []
_PATHS: dict[str, Callable[[str], str]] = {}


def register_workflow_resolver(resolver: Resolver) -> None:
    """Add a resolver of workflow names and classes; resolvers run in the order of their registration."""
    _RESOLVERS.append(resolver)


def register_path_prefix(prefix: str, translate: Callable[[str], str]) -> None:
    """Translate the dotted paths of workflows and rewards that begin with `prefix`, such as "areal."."""
    _PATHS[prefix] = translate


def apply_resolvers(workflow: Any, arguments: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return a workflow and its constructor arguments after all resolvers."""
    for resolver in _RESOLVERS:
        workflow, arguments = resolver(workflow, arguments)
    return workflow, arguments


def translate_path(path: str) -> str:
    """Return archon's dotted path for a path with a registered prefix, and any other path unchanged."""
    return next((translate(path) for prefix, translate in _PATHS.items() if path.startswith(prefix)), path)
