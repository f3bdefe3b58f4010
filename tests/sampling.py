"""Sample the parameters of parametrized tests: `ARCHON_SAMPLE=N` runs about one of N.

The commit chooses the sample, so that N commits together run about all parameters. Every test function runs with at
least one of its parameters.
"""

from __future__ import annotations

import os
import subprocess
import zlib
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

SAMPLE = int(os.environ.get("ARCHON_SAMPLE", "1"))


def deselected(nodeids: Iterable[str], sample: int, commit: bytes) -> set[str]:
    """Return the tests to deselect: all but about one of `sample` of each function's parameters, and at least one."""
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
def current_commit() -> bytes:
    """Return the hash of the checked-out commit."""
    return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent)
