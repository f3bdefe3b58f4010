"""Objects that users find by a short name: archon's, registered ones, and those of other packages' entry points."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Generic, TypeVar, overload

from archon.schema.errors import ConfigError

T = TypeVar("T")


class NamedObjects(Generic[T]):
    """Objects by name. Entry points of the group are loaded when a name is asked for that is not registered.

    Args:
        what: what an object is, for messages: "reward function".
        group: the group of entry points that other packages register theirs by.
        built_in: the objects that archon has.
    """

    def __init__(self, what: str, group: str, built_in: Mapping[str, T]) -> None:
        self.what, self.group = what, group
        self._objects = dict(built_in)
        self.names: Sequence[str] = _Names(self)

    def register(self, name: str) -> Callable[[T], T]:
        """Registers the decorated object under `name`. Raises ConfigError where another one has it."""

        def add(item: T) -> T:
            known = self._objects.get(name, item)
            if known is not item and not _is_same_definition(known, item):
                raise ConfigError(f"the {self.what} {name!r} is registered already, as {known!r}; choose another name")
            self._objects[name] = item
            return item

        return add

    def find(self, name: str) -> T | None:
        """Returns the object of this name, or None. Raises ConfigError for an entry point that cannot be loaded."""
        if name not in self._objects:
            for entry in metadata.entry_points(group=self.group, name=name):
                try:
                    self._objects.setdefault(name, entry.load())
                except (Exception, SystemExit) as error:
                    reason = " ".join(f"{type(error).__name__}: {error}".split())
                    package = entry.dist.name if entry.dist is not None else "of an unknown name"
                    raise ConfigError(
                        f"the {self.what} {name!r} of package {package} ({entry.value}) cannot be loaded: {reason}"
                    ) from error
        return self._objects.get(name)

    def nearest(self, name: str) -> str:
        """Returns " (did you mean …?)" for a name that is close to a known one, else an empty string."""
        near = difflib.get_close_matches(name, list(self.names), n=1)
        return f" (did you mean {near[0]!r}?)" if near else ""

    def known_names(self) -> list[str]:
        """Returns all names, sorted; those of entry points without loading them."""
        return sorted({*self._objects, *(entry.name for entry in metadata.entry_points(group=self.group))})


class _Names(Sequence[str]):
    """The names of a registry as they are when they are read."""

    def __init__(self, objects: NamedObjects[T]) -> None:
        self._objects = objects

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._objects.known_names()[index]

    def __len__(self) -> int:
        return len(self._objects.known_names())

    def __iter__(self) -> Iterator[str]:
        return iter(self._objects.known_names())

    def __contains__(self, name: object) -> bool:
        return name in self._objects.known_names()

    def __repr__(self) -> str:
        return repr(self._objects.known_names())


def _is_same_definition(one: object, other: object) -> bool:
    """Returns whether two objects are one definition, imported or run twice, as a notebook cell is."""
    names = [(getattr(item, "__module__", None), getattr(item, "__qualname__", None)) for item in (one, other)]
    return None not in names[0] and names[0] == names[1]
