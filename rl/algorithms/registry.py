"""Registries of algorithm parts by name; users name their own parts by dotted path."""

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
    """Values by name or dotted path. An unknown name raises `ConfigError` with the nearest known name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Register the decorated object under `name`; raise `ConfigError` if the name is taken."""

        def add(entry: T) -> T:
            if name in self._entries:
                raise ConfigError(f"{self.kind} {name!r} is already registered; choose another name")
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            if "." in name:
                imported: T = import_dotted(name, self.kind)
                return imported
            hint = f"{nearest(name, list(self._entries))}; expected 'package.module.Name', a dotted path, for your own"
            raise ConfigError(f"unknown {self.kind} {name!r}{hint}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class MethodSettings(StrictModel):
    """Base class of method settings."""

    kind: str = Field(description="the method's name, or the dotted path of a function")


class MethodRegistry(Registry[T]):
    """Functions `f(…, settings)` by name. The last parameter's annotation is the settings class.

    Args:
        kind: kind of method, for messages.
        base: settings class of functions without the annotation.
    """

    def __init__(self, kind: str, base: type[MethodSettings]) -> None:
        super().__init__(kind)
        self.base = base

    def settings_class(self, name: str) -> type[MethodSettings]:
        """Return the settings class of a method."""
        function: Any = self[name]
        if not callable(function):
            raise ConfigError(f"{self.kind} {name!r} is {function!r:.80}, expected a function")
        annotation: Any = None
        for parameter in inspect.signature(function).parameters.values():
            annotation = parameter.annotation  # keeps the last parameter's
        if isinstance(annotation, str):  # under `from __future__ import annotations`
            first, *attributes = annotation.split(".")
            module_object = function.__globals__.get(first)
            annotation = reduce(lambda owner, name: getattr(owner, name, None), attributes, module_object)
        return annotation if isinstance(annotation, type) and issubclass(annotation, self.base) else self.base

    def parse(self, value: Any) -> Any:
        """Return the settings of a configuration value: a method's name, or a mapping with `kind`."""
        if isinstance(value, str):
            value = {"kind": value}
        if not isinstance(value, Mapping) or not isinstance(kind := value.get("kind"), str):
            if isinstance(value, MethodSettings):
                return value
            raise ValueError(f"got {value!r:.80}, expected a name, or a mapping with `kind` and settings")
        return self.settings_class(kind).model_validate(dict(value))

    def alternatives(self) -> dict[type[MethodSettings], list[str]]:
        """Return the settings classes with the names of the methods that use them."""
        names_of: dict[type[MethodSettings], list[str]] = {}
        for name in self:
            names_of.setdefault(self.settings_class(name), []).append(name)
        return names_of
