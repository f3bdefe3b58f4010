"""`stats_tracker`, by which AReaL's workflows report numbers: they become metrics of the step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from archon.rl.episode_context import workflow_context


class StatsTracker:
    """Reports numbers of the running episode. Evaluations have names of their own in the record, whatever the scope."""

    def get(self, scope: str = "") -> StatsTracker:
        """Return the tracker of `workflow_context.stat_scope()`, which is this one."""
        return self

    def scalar(self, **numbers: float) -> None:
        """Add numbers, whose means become metrics of the step."""
        workflow_context.record(**numbers)

    @contextmanager
    def record_timing(self, name: str) -> Iterator[None]:
        """Add the seconds of the block as `timeperf/<name>`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            workflow_context.record(**{f"timeperf/{name}": time.perf_counter() - started})


stats_tracker = StatsTracker()
