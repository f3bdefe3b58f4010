"""Which pages of the cache are whose: a pool of reference-counted page numbers."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class BlockPool:
    """Page numbers 0 … n_pages − 1. The lowest free ones are handed out first, so that pages in use stay together."""

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self._free = list(range(n_pages))
        self._references = [0] * n_pages

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages with one reference each; the caller has checked `n_free`."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more owner for each of `pages`."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One owner fewer for each of `pages`; those without an owner are free again."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free"
            self._references[page] -= 1
            if self._references[page] == 0:
                heapq.heappush(self._free, page)
