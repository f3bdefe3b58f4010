"""`stats_tracker` of AReaL's workflows; its numbers become metrics of the step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from archon.rl.episode_context import workflow_context


class StatsTracker:
    """Recorder of numbers of the running episode; evaluations are logged under separate names."""

    def get(self, scope: str = "") -> StatsTracker:
        """Return this tracker, for any scope."""
        return self

    def scalar(self, **numbers: float) -> None:
        """Add numbers; their means become metrics of the step."""
        workflow_context.record(**numbers)

    @contextmanager
    def record_timing(self, name: str) -> Iterator[None]:
        """Record the duration of the block in seconds as `timeperf/<name>`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            workflow_context.record(**{f"timeperf/{name}": time.perf_counter() - started})


stats_tracker = StatsTracker()
