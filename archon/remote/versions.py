"""Weight versions on the wire, unique for each trainer."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from archon.schema.errors import RolloutError

VERSIONS = 10**7
"""Weight versions of one trainer. With `TRAINERS`, a number on the wire stays below 2**53, which JSON and Prometheus
keep exact."""
TRAINERS = 9 * 10**8
"""Ids of trainers. Two trainers have the same id once in 9e8 cases."""


def new_trainer() -> int:
    """Return a random id of a trainer; it does not depend on the run's seed."""
    return 1 + secrets.randbelow(TRAINERS - 1)


@dataclass(frozen=True)
class WireVersions:
    """Versions of one trainer as its servers store and report them: the trainer's id, then seven digits of the version.

    Two trainers that push to one server have equal version numbers. With bare numbers, each would take the tokens of
    the other's weights for tokens of its own.
    """

    trainer: int

    def encode(self, version: int) -> int:
        """Return the number of a version on the wire. Raises RolloutError if the version has more than seven digits."""
        if not 0 <= version < VERSIONS:
            raise RolloutError(f"version {version} of the weights cannot be pushed; expected 0 to {VERSIONS - 1}")
        return self.trainer * VERSIONS + version

    def decode(self, name: str) -> int | None:
        """Return the version that a server reports as `name`; None if the weights are not this trainer's."""
        trainer, version = _split(name)
        return version if trainer == self.trainer else None

    def describe(self, name: str) -> str:
        """Return a version for error messages."""
        trainer, version = _split(name)
        if not trainer:
            return f"version {name!r}"
        return f"version {version}" + ("" if trainer == self.trainer else " of another trainer")

    def is_foreign(self, name: str) -> bool:
        """Return whether another trainer has pushed the weights."""
        return _split(name)[0] not in (0, self.trainer)


def _split(name: str) -> tuple[int, int]:
    """Return trainer and version of a name on the wire; trainer 0 if no trainer has pushed the weights."""
    number = int(name) if name.isascii() and name.isdecimal() else 0
    trainer, version = divmod(number, VERSIONS)
    return (trainer, version) if trainer < TRAINERS and str(number) == name else (0, 0)
