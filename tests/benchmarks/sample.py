"""A benchmark of nothing, whose sides behave, are not installed, fail, die or talk too much."""

from __future__ import annotations

import os
import sys

from benchmarks import harness


def prepare(side, options):
    print("what a library prints must not land among the answers")
    if side == "not installed":
        raise ImportError("No module named 'some_peer'")
    runs = []

    def run(**request):
        runs.append(request)
        print("nor this")
        if side == "fails later" and len(runs) == 2:
            raise ValueError("out of\nideas")
        if side == "dies later" and len(runs) == 2:
            os._exit(3)
        held = bytearray(options["bytes"] if side == "archon" else 0)
        held[::4096] = b"x" * len(held[::4096])
        return {"runs": len(runs), "request": request}

    return {"side": side, "answer": options["answer"]}, run


if __name__ == "__main__":
    harness.serve(prepare, sys.argv[sys.argv.index("--worker") + 1])
