"""What a planted mistake is."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A mistake as an edit of the source, and the tests that ought to notice it.

    Args:
        name: what is wrong, in a few words.
        file: the module, from the root of the tree.
        snippet: is in it exactly once.
        replacement: what the mistake puts in its place.
        tests: pytest's names of tests or of files of them.
    """

    name: str
    file: str
    snippet: str
    replacement: str
    tests: tuple[str, ...]

    @property
    def patch(self) -> str:
        """A digest of the edit: it changes with the file, the snippet and the replacement."""
        edit = json.dumps([self.file, self.snippet, self.replacement])
        return hashlib.sha256(edit.encode()).hexdigest()[:12]

    def applied(self, text: str) -> str:
        """Return the module with the mistake. Raises ValueError unless `snippet` is in `text` exactly once."""
        found = text.count(self.snippet)
        if found != 1:
            raise ValueError(f"{self.name}: its snippet occurs {found} times in {self.file}, expected once")
        return text.replace(self.snippet, self.replacement)
