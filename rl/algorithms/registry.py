"""Tables from names to the parts of an algorithm: a part is added by registering it, not by editing a switch.

A part that lies in a package of one's own is named by its dotted path, and needs no registering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from archon.schema.config import nearest
from archon.schema.errors import ConfigError
from archon.schema.lazy import import_dotted

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Named values of one kind, and those that dotted paths lead to. Looking up an unknown name is a `ConfigError` that
    names the nearest known one."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: claim `name`. Raises `ConfigError` when the name is taken."""

        def claim(entry: T) -> T:
            if name in self._entries:
                raise ConfigError(f"{self.kind} {name!r} is registered already; choose another name")
            self._entries[name] = entry
            return entry

        return claim

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            if "." in name:
                found: T = import_dotted(name, self.kind)
                return found
            raise ConfigError(f"unknown {self.kind} {name!r}{nearest(name, list(self._entries))}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
