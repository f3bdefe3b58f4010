"""How gloo groups are made, and how a process with some ends."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from archon.parallel.gloo import use_single_worker_gloo

pytestmark = pytest.mark.xdist_group("ranks")

RANK = """
import sys, threading, time
import numpy, torch, torch.distributed as dist
from archon.parallel.gloo import use_single_worker_gloo

rank, store = int(sys.argv[1]), sys.argv[2]
use_single_worker_gloo()
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
begun = threading.Event()

class Slow(numpy.ndarray):
    def __del__(self):
        begun.set()
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            pass
        print("dropped by", threading.current_thread().name.partition("-")[0], flush=True)

if rank == 0:
    dist.all_reduce(torch.from_numpy(numpy.zeros(4).view(Slow)), async_op=True)
    begun.wait()
else:
    time.sleep(0.3)  # so that rank 0's worker is the last to hold the memory
    dist.all_reduce(torch.zeros(4, dtype=torch.float64))
"""


@pytest.mark.slow
def test_a_process_ends_after_its_workers(tmp_path: Path) -> None:
    """A worker that drops a tensor while the interpreter ends aborts the process."""
    start = [sys.executable, "-c", RANK]
    store = str(tmp_path / "store")
    processes = [subprocess.Popen([*start, rank, store], stdout=subprocess.PIPE, text=True) for rank in "01"]
    told = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert told == ["dropped by Dummy\n", ""]


def test_a_group_takes_further_options_as_newer_releases_of_torch_give_it() -> None:
    use_single_worker_gloo()
    limit = timedelta(seconds=5)
    group = distributed_c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, limit, group_name="given")
    assert (group.options.group_name, group.options._threads) == ("given", 1)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        distributed_c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, limit, nothing=1)
