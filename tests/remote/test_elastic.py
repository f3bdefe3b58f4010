"""A rank that dies: torchrun starts all ranks again, which go on from the last checkpoint while the servers live on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from archon.remote.http import KEY
from archon.training.metrics import read_jsonl
from tests.remote.served import TOKEN, ServeProcess
from tests.rl.conftest import fresh_checkpoint, small_run
from tests.tolerances import FIRST_RATIO_FP32

STEPS = 8


def ranks(torchrun: psutil.Process) -> dict[int, psutil.Process]:
    """The processes of torchrun's ranks, by rank."""
    return {int(child.environ()["RANK"]): child for child in torchrun.children() if "RANK" in child.environ()}


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_ranks_that_torchrun_restarts_go_on_while_the_server_lives_on(blank: Path, tmp_path: Path) -> None:
    run = small_run(blank, tmp_path / "run") | {"generator": None, "total_steps": STEPS, "resume": True}
    run["actor"] |= {"layout": "d2"}
    run["checkpoint"] = {"every": 1}
    metrics, told = tmp_path / "run" / "metrics.jsonl", tmp_path / "told"

    def steps() -> list[dict[str, Any]]:
        return [record for record in read_jsonl(metrics) if "push/servers" in record] if metrics.exists() else []

    server = ServeProcess(fresh_checkpoint(blank, tmp_path / "model"), Path("/dev/shm"), tmp_path / "log")
    try:
        run["rollout"] |= {"servers": [server.wait()]}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "3", "-m", "archon", "rl", "--config", str(tmp_path / "run.yaml")]
        environment = os.environ | {"OMP_NUM_THREADS": "1", KEY: TOKEN}
        with told.open("w") as output:
            started = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + 200
            while len(steps()) < 3:
                assert started.poll() is None and time.monotonic() < until, told.read_text()
                time.sleep(0.02)
            first = ranks(psutil.Process(started.pid))
            first[1].send_signal(signal.SIGKILL)
            assert started.wait(200) == 0, told.read_text()
        finally:
            for process in [*psutil.Process(started.pid).children(recursive=True)] if started.poll() is None else []:
                process.kill()
            started.kill()
            started.wait()
        assert server.process.poll() is None, "the server lives on"
    finally:
        server.stop()
    assert "resuming after step" in told.read_text()
    done = steps()
    assert [step["version"] for step in done] == list(range(1, STEPS + 1)), "each step stands once"
    assert all(step["push/servers"] == 1 and step["first_logprob_diff"] < FIRST_RATIO_FP32 for step in done)
