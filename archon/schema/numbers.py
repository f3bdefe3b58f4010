"""Limits of number formats, for packages that do not import torch."""

from archon.schema.errors import ConfigError

LARGEST_FLOAT32 = 3.4e38
"""Largest number of float32, 3.4028e38, rounded down; rewards are tensors of float32."""
MAX_DIGITS = 18
"""Digits of an integer in text: every such number fits into 64 bits."""


def read_integer(text: str, source: str) -> int:
    """Return the integer of a text of digits.

    Raises:
        ConfigError: it is not digits, or it has more than `MAX_DIGITS`; `source` names the text.
    """
    if not text.isdecimal() or len(text) > MAX_DIGITS:
        shown = repr(text) if len(text) <= 40 else f"{text[:20]!r}… ({len(text)} characters)"
        raise ConfigError(f"{source} is {shown}; expected an integer of at most {MAX_DIGITS} digits")
    return int(text)
