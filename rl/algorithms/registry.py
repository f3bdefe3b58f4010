"""Tables from names to the parts of an algorithm: a part is added by registering it, not by editing a switch.

A part that lies in a package of one's own is named by its dotted path, and needs no registering.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any, TypeVar

from pydantic import Field

from archon.schema.config import StrictModel, nearest
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


class MethodSettings(StrictModel):
    """The settings of one method; those of a method of one's own derive from this."""

    kind: str = Field(description="the method's name, or the dotted path of one's own")


class MethodRegistry(Registry[T]):
    """Functions `f(…, settings)` by name, each of which says by its annotation of `settings` what these are.

    Args:
        kind: what the methods are, for messages.
        base: the settings of a function that names none.
    """

    def __init__(self, kind: str, base: type[MethodSettings]) -> None:
        super().__init__(kind)
        self.base = base

    def settings_class(self, name: str) -> type[MethodSettings]:
        """Returns the class of the settings of the method called `name`."""
        function: Any = self[name]
        if not callable(function):
            raise ConfigError(f"{self.kind} {name!r} is {function!r:.80}, expected a function")
        found: Any = [parameter.annotation for parameter in inspect.signature(function).parameters.values()][-1:]
        found = found[0] if found else None
        if isinstance(found, str):  # as `from __future__ import annotations` leaves it
            module, *names = found.split(".")
            found = reduce(lambda owner, name: getattr(owner, name, None), names, function.__globals__.get(module))
        return found if isinstance(found, type) and issubclass(found, self.base) else self.base

    def parse(self, value: Any) -> Any:
        """Returns the settings that a configuration gives as a name or as a mapping with `kind`, each with the
        method's own defaults."""
        if isinstance(value, str):
            value = {"kind": value}
        if not isinstance(value, Mapping) or not isinstance(kind := value.get("kind"), str):
            if isinstance(value, MethodSettings):
                return value
            raise ValueError(f"got {value!r:.80}, expected the name of one, or a mapping with `kind` and its settings")
        return self.settings_class(kind).model_validate(dict(value))

    def alternatives(self) -> dict[type[MethodSettings], list[str]]:
        """Returns the classes of settings, and which registered methods have each."""
        found: dict[type[MethodSettings], list[str]] = {}
        for name in self:
            found.setdefault(self.settings_class(name), []).append(name)
        return found
