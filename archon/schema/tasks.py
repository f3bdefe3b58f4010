"""Asynchronous tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import TypeVar

Result = TypeVar("Result")


async def results_as_completed(tasks: Collection[asyncio.Task[Result]]) -> AsyncIterator[Result]:
    """Yield the result of each task when it finishes. The first error cancels the other tasks and is raised."""
    try:
        for task in asyncio.as_completed(tasks):
            yield await task
    finally:
        # Errors of the other tasks are collected, because asyncio would print a traceback for each.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
