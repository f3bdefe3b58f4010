"""What a save in the background says when it fails."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from archon.checkpoint import saver
from archon.checkpoint.saver import Saver


@pytest.mark.parametrize(
    ("message", "logged"),
    [("[gloo/transport/tcp/pair.cc:537] Connection closed by peer", False), ("no such tensor", True)],
)
def test_the_end_of_another_rank_is_left_to_that_rank_to_report(
    message: str, logged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write() -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(saver, "prepare_save", lambda *arguments, **options: write)
    saving = Saver()
    with caplog.at_level(logging.WARNING):
        saving.save(tmp_path, 1, {}, asynchronous=True)
        with pytest.raises(RuntimeError, match=message[-12:]):
            saving.wait()
    assert bool(caplog.records) is logged
