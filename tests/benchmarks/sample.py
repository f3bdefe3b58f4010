"""A benchmark of nothing, on one rank or several, whose sides behave, are not installed, fail, die or talk."""

from __future__ import annotations

import os
import sys
import time

from benchmarks import harness


def prepare(side, options):
    print("what a library prints must not land among the answers")
    if side == "not installed":
        raise ImportError("No module named 'some_peer'")
    rank = int(os.environ.get("RANK", "0"))
    if options.get("ranks", 1) > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    runs = []

    def run(**request):
        runs.append(request)
        if rank == 1 and side == "one rank fails":
            raise ValueError("out of ideas")
        if options.get("ranks", 1) > 1:
            dist.barrier()
        time.sleep(rank * options.get("rank_seconds", 0))
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
