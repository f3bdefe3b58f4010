"""Filters that a run names by their dotted path."""

from __future__ import annotations

from typing import Any


def none(group: dict[str, Any]) -> bool:
    return False
