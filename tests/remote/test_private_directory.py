"""Folders of pushes: gone with their process, also after `kill -9`."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from archon.remote.private_directory import PREFIX, PrivateDirectory

MAKE = (
    "import sys, time, pathlib; from archon.remote.private_directory import PrivateDirectory\n"
    "own = PrivateDirectory(pathlib.Path(sys.argv[1])); (own.path / 'weights').write_text('1')\n"
    "print(own.path, flush=True); sys.stdin.read()"
)


def made_by_another(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", MAKE, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_of_a_killed_process_is_removed_and_one_of_a_live_process_stays(tmp_path: Path) -> None:
    (other := tmp_path / "archon-push-another").mkdir()
    killed, first = made_by_another(tmp_path)
    lives, second = made_by_another(tmp_path)
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert (first / "weights").exists() and (second / "weights").exists()
        own, further = PrivateDirectory(tmp_path), PrivateDirectory(tmp_path)
        assert not first.exists() and (second / "weights").exists()
        assert own.path.is_dir() and further.path.is_dir(), "those of this process too"
        own.close()
        further.close()
        own.close()
    finally:
        lives.communicate()  # ends it in order
    assert [*tmp_path.iterdir()] == [other] and not [*tmp_path.glob(f".{PREFIX}*")]
