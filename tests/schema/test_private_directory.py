"""Private folders: removed with their process, also after `kill -9` of it and its keeper."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from archon.schema import keeper
from archon.schema.private_directory import PrivateDirectory

PREFIX = "archon-pushes-"
MAKE = (
    "import sys, pathlib; from archon.schema import private_directory\n"
    f"own = private_directory.PrivateDirectory({PREFIX!r}, pathlib.Path(sys.argv[1]))\n"
    "(own.path / 'weights').write_text('1')\n"
    "print(own.path, flush=True); sys.stdin.read()"
)


def made_by_another(parent: Path) -> tuple[subprocess.Popen[str], Path, int]:
    """A process, its folder, and the process id of its keeper."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE, str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    (keeper_pid,) = [
        found.pid
        for found in psutil.process_iter(["cmdline"])
        if found.info["cmdline"]
        and found.info["cmdline"][3:4] == [keeper.__file__]
        and found.info["cmdline"][5] == str(process.pid)
    ]
    return process, path, keeper_pid


def test_a_folder_of_a_killed_process_is_removed_and_one_of_a_live_process_stays(tmp_path: Path) -> None:
    (other := tmp_path / f"{PREFIX}another").mkdir()
    killed, first, keeper_pid = made_by_another(tmp_path)
    lives, second, _ = made_by_another(tmp_path)
    try:
        os.kill(keeper_pid, signal.SIGKILL)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert (first / "weights").exists() and (second / "weights").exists()
        own, further = PrivateDirectory(PREFIX, tmp_path), PrivateDirectory(PREFIX, tmp_path)
        assert not first.exists() and (second / "weights").exists()
        assert own.path.is_dir() and further.path.is_dir(), "those of this process too"
        own.close()
        further.close()
        own.close()
    finally:
        lives.communicate()  # ends it in order
    assert [*tmp_path.iterdir()] == [other] and not [*tmp_path.glob(f".{PREFIX}*")]


def test_the_keeper_removes_the_folder_of_a_killed_process_group(tmp_path: Path) -> None:
    killed, folder, _ = made_by_another(tmp_path)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    end = time.monotonic() + 10
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert [*tmp_path.iterdir()] == []
