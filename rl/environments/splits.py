"""Train and test splits of episodes and questions."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from archon.data.environments import EnvironmentName
from archon.schema.errors import DatasetError

SIZE = 500
"""Default number of rows."""
HELD_OUT_EVERY = 5
"""One in `HELD_OUT_EVERY` questions is held out."""


def require_split(name: EnvironmentName, split: str, known: tuple[str, ...]) -> None:
    """Raise DatasetError for an unknown split."""
    if split not in known:
        raise DatasetError(f"{name.text}: split is {split!r}; expected one of {', '.join(known)}")


def is_held_out(question: str) -> bool:
    """Return whether a question belongs to split `test`, by a hash of its text."""
    return sha256(question.encode(errors="surrogatepass")).digest()[0] % HELD_OUT_EVERY == 0


def episode_rows(name: EnvironmentName, split: str, seed: int, size: int) -> list[dict[str, Any]]:
    """Return rows with an episode `seed` below 2³¹: even seeds for training, odd seeds held out."""
    require_split(name, split, ("train", "test"))
    drawn = (int.from_bytes(sha256(f"{seed} {i}".encode()).digest()[:4], "big") >> 2 for i in range(size))
    return [{"environment": name.text, "seed": 2 * value + (split == "test")} for value in drawn]
