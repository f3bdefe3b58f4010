"""Servers that fork processes, of a process and of its children."""

from __future__ import annotations

import time
from multiprocessing.util import get_temp_dir
from pathlib import Path

from tests.warm import run_code


def test_a_child_process_with_a_server_leaves_that_of_its_parent() -> None:
    started = run_code(
        "from archon.engine.forkserver import forkserver_context; forkserver_context(); print('started')"
    )
    assert started.stdout == "started\n", started.stderr
    until = time.monotonic() + 1  # the keeper of the child removes folders after the child's end
    while time.monotonic() < until:
        assert Path(get_temp_dir()).exists()
        time.sleep(0.05)
    assert run_code("print('again')").stdout == "again\n"
