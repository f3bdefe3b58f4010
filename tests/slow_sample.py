"""Which slow tests of a long parametrization a commit runs, where `ARCHON_SLOW_SAMPLE=N` asks for one of N.

Each test function runs with some of its parameters, which the commit chooses: over N commits with about all of them.
"""

from __future__ import annotations

import os
import subprocess
import zlib
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

SAMPLE = int(os.environ.get("ARCHON_SLOW_SAMPLE", "1"))


def left_out(nodeids: Iterable[str], sample: int, commit: bytes) -> set[str]:
    """Return the tests that a commit does not run: of each function it keeps about one of `sample`, at least one."""
    functions = defaultdict[str, list[str]](list)
    for nodeid in nodeids:
        functions[nodeid.partition("[")[0]].append(nodeid)

    def number(nodeid: str) -> int:
        return zlib.crc32(commit + nodeid.encode())

    kept = {
        min(nodeids, key=lambda nodeid: (number(nodeid) % sample, number(nodeid))) for nodeids in functions.values()
    }
    return {
        nodeid for nodeids in functions.values() for nodeid in nodeids if number(nodeid) % sample and nodeid not in kept
    }


@cache
def this_commit() -> bytes:
    """Return the checkout's commit."""
    return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent)
