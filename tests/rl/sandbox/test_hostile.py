"""Hostile programs break no limit, reach nothing of the host and leave nothing behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from archon.rl.sandbox import Sandbox
from benchmarks.sandbox import leftovers
from benchmarks.sandbox_programs import FAST_HOSTILE, HONEST, HOSTILE, SLOW_HOSTILE, command_of


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_ends_as_without_a_sandbox(any_sandbox: Sandbox, name: str) -> None:
    program = HONEST[name]
    result = any_sandbox.run(*command_of(program, {}), stdin=program.stdin, limits=program.limits)
    assert program.fault(result) is None


@pytest.mark.unsampled
@pytest.mark.parametrize("name", FAST_HOSTILE)
def test_a_hostile_program_is_held_and_leaves_nothing(sandbox: Sandbox, host: dict[str, str], name: str) -> None:
    check(sandbox, host, name)


@pytest.mark.parametrize("name", SLOW_HOSTILE)
def test_a_hostile_program_that_does_not_end_leaves_nothing(sandbox: Sandbox, host: dict[str, str], name: str) -> None:
    check(sandbox, host, name)


def check(sandbox: Sandbox, host: dict[str, str], name: str) -> None:
    program = HOSTILE[name]
    mounts = Path("/proc/self/mountinfo").read_text()
    started = time.monotonic()
    result = sandbox.run(*command_of(program, host), stdin=program.stdin, limits=program.limits)
    assert program.fault(result) is None
    assert time.monotonic() - started < program.limits.wall_seconds + 4
    assert leftovers(os.getpid(), host["token"]) == []
    assert Path("/proc/self/mountinfo").read_text() == mounts
    after = sandbox.run(["python", "a.py"], {"a.py": "import os\nprint(os.listdir('/tmp'), len(os.listdir('/proc')))"})
    assert after.stdout == "['a.py'] 4\n"  # its two processes, self and thread-self


HELD_BY_RLIMITS = (
    *("fork_bomb", "thread_bomb", "memory", "memory_of_children", "shared_memory", "endless_output", "endless_loop"),
    *("sleep", "deaf_sleep", "children_left", "deaf_children_left", "huge_file", "stopped"),
    *("hidden_shared_memory", "memory_of_orphans", "memory_behind_an_ended_thread"),
    *(
        "process_behind_an_ended_thread_left",
        "kernel_objects",
        "rights",
        "open_files",
        "closed_files",
        "poisoned_interpreter",
        "odd_files",
    ),
)


@pytest.mark.parametrize("name", HELD_BY_RLIMITS)
def test_rlimits_hold_what_security_promises(rlimits: Sandbox, host: dict[str, str], name: str) -> None:
    program = HOSTILE[name]
    result = rlimits.run(*command_of(program, host), limits=program.limits)
    assert program.fault(result) is None
    assert leftovers(os.getpid(), host["token"]) == []
    assert rlimits.run(["python", "a.py"], {"a.py": "print(1)"}).stdout == "1\n"
