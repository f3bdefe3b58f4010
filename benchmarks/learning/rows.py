"""Rows on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write them as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
