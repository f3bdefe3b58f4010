"""Sample tests: `ARCHON_SAMPLE=N` runs about one of N parameters, `ARCHON_SAMPLE_FUNCTIONS=M` one of M test functions.

The commit chooses the sample, so that over the commits every test runs. Every test function of the sample runs with at
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
SAMPLE_FUNCTIONS = int(os.environ.get("ARCHON_SAMPLE_FUNCTIONS", "1"))


def deselected(nodeids: Iterable[str], sample: int, commit: bytes, sample_functions: int = 1) -> set[str]:
    """Return the tests to deselect: all but about one of `sample` parameters, at least one, of the functions that run.

    About one of `sample_functions` test functions runs.
    """
    functions = defaultdict[str, list[str]](list)
    for nodeid in nodeids:
        functions[nodeid.partition("[")[0]].append(nodeid)

    def number(nodeid: str) -> int:
        return zlib.crc32(commit + nodeid.encode())

    kept = set[str]()
    for function, parametrized in functions.items():
        if number(function) % sample_functions == 0:
            kept |= {nodeid for nodeid in parametrized if number(nodeid) % sample == 0} or {
                min(parametrized, key=number)
            }
    return {nodeid for parametrized in functions.values() for nodeid in parametrized} - kept


@cache
def current_commit() -> bytes:
    """Return the hash of the checked-out commit."""
    return subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent)
