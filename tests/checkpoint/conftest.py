"""What the tests of checkpoints share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files and folders that were synced, in order, by the names they had then."""
    names: list[str] = []
    sync = os.fsync

    def record(handle: int) -> None:
        names.append(os.readlink(f"/proc/self/fd/{handle}"))
        sync(handle)

    monkeypatch.setattr(os, "fsync", record)
    return names
