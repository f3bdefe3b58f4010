"""Registries of named objects: built in, registered, or from the entry points of other packages."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Generic, TypeVar, overload

from archon.schema.errors import ConfigError, describe_error
from archon.schema.user_code import LEAVING

T = TypeVar("T")


class NamedObjects(Generic[T]):
    """Registry of objects by name. Entry points are loaded on the first lookup of their name.

    Args:
        what: kind of object for messages, such as "reward function".
        group: entry-point group of other packages.
        built_in: the objects of archon.
    """

    def __init__(self, what: str, group: str, built_in: Mapping[str, T]) -> None:
        self.what, self.group = what, group
        self._objects = dict(built_in)
        self.names: Sequence[str] = _Names(self)

    def register(self, name: str) -> Callable[[T], T]:
        """Register the decorated object under `name`. Raises ConfigError if the name is taken."""

        def add(item: T) -> T:
            known = self._objects.get(name, item)
            if known is not item and not _is_same_definition(known, item):
                raise ConfigError(f"the {self.what} {name!r} is registered already, as {known!r}; choose another name")
            self._objects[name] = item
            return item

        return add

    def find(self, name: str) -> T | None:
        """Return the object of this name, or None. Raises ConfigError if an entry point cannot be loaded."""
        if name not in self._objects:
            for entry in metadata.entry_points(group=self.group, name=name):
                try:
                    self._objects.setdefault(name, entry.load())
                except (Exception, *LEAVING) as error:
                    package = entry.dist.name if entry.dist is not None else "of an unknown name"
                    raise ConfigError(
                        f"the {self.what} {name!r} of package {package} ({entry.value}) cannot be "
                        f"loaded: {describe_error(error)}"
                    ) from error
        return self._objects.get(name)

    def nearest(self, name: str) -> str:
        """Return " (did you mean …?)" if a known name is close to `name`, else an empty string."""
        near = difflib.get_close_matches(name, list(self.names), n=1)
        return f" (did you mean {near[0]!r}?)" if near else ""

    def known_names(self) -> list[str]:
        """Return all names, sorted, without loading entry points."""
        return sorted({*self._objects, *(entry.name for entry in metadata.entry_points(group=self.group))})


class _Names(Sequence[str]):
    """Live view of the names of a registry."""

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
    """Return whether two objects are the same definition, imported or run twice like a notebook cell."""
    names = [(getattr(item, "__module__", None), getattr(item, "__qualname__", None)) for item in (one, other)]
    return None not in names[0] and names[0] == names[1]
