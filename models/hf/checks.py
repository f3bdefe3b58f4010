"""Checks of the values in a Hugging Face config."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NoReturn

from archon.schema.errors import ConfigError


def reject_field(name: str, value: Any, expected: str) -> NoReturn:
    """Raise ConfigError with a field, its value, and what was expected."""
    raise ConfigError(f"config field {name!r} is {value!r}; {expected}", field=name)


def check_kind(name: str, value: Any, kind: type) -> Any:
    """Returns `value` as `kind`; an integer is accepted as a float, a bool is not a number.

    Raises ConfigError, naming the field, for another type, NaN or infinity.
    """
    wanted: tuple[type, ...] = (int, float) if kind is float else (kind,)
    if isinstance(value, wanted) and (kind is bool or not isinstance(value, bool)):
        with suppress(OverflowError):  # an integer that no float can hold
            converted = kind(value)
            if kind is not float or abs(converted) < float("inf"):
                return converted
    reject_field(name, value, f"expected {'a number' if kind is float else 'type ' + kind.__name__}")
