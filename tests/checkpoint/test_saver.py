"""What a save in the background says when it fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
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


@pytest.mark.parametrize("same_saver", [True, False])
def test_one_checkpoint_is_written_at_a_time(same_saver: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save begins after the earlier one in the background has ended, of the same engine or of another one."""
    events, may_end = list[str](), threading.Event()

    def prepare_save(root: Path, step: int, *_: object, **__: object) -> Callable[[], None]:
        events.append(f"{step} begins")

        def write() -> None:
            assert step == 2 or may_end.wait(10)
            events.append(f"{step} ends")

        return write

    monkeypatch.setattr(saver, "prepare_save", prepare_save)
    first = Saver()
    second = first if same_saver else Saver()
    first.save(tmp_path, 1, {}, asynchronous=True)
    timer = threading.Timer(0.2, may_end.set)
    timer.start()
    second.save(tmp_path, 2, {})
    timer.join()
    first.wait()
    assert events == ["1 begins", "1 ends", "2 begins", "2 ends"]


def test_the_error_of_a_background_save_is_raised_once_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write() -> None:
        raise RuntimeError("no such tensor")

    monkeypatch.setattr(saver, "prepare_save", lambda *arguments, **options: write)
    saving = Saver()
    saving.save(tmp_path, 1, {}, asynchronous=True)
    with pytest.raises(RuntimeError, match="no such tensor"):
        saving.wait()
    saving.wait()
    saving.save(tmp_path, 2, {}, asynchronous=True)
    with pytest.raises(RuntimeError, match="no such tensor"):
        saving.save(tmp_path, 3, {}, asynchronous=True)
    saving.wait()
