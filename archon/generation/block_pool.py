"""A pool of reference-counted page numbers of the key-value cache."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class BlockPool:
    """Allocates page numbers 0 … n_pages − 1, the lowest free ones first, so that used pages stay close together."""

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self._free = list(range(n_pages))
        self._references = [0] * n_pages

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Returns `count` free pages, now with one reference each; the caller must have checked `n_free`."""
        assert count <= len(self._free), f"{count} pages requested, {len(self._free)} free"
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each of `pages`."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a reference from each of `pages`; those without references become free."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] -= 1
            if self._references[page] == 0:
                heapq.heappush(self._free, page)
