"""One run over two hosts: ranks on both, servers on the other, and a cable that is cut and joined again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from archon.remote.http import KEY
from archon.training.metrics import read_jsonl
from benchmarks.namespaces import Cable
from tests.distributed.runs import make_inputs
from tests.distributed.test_failing import torchrun
from tests.remote.served import TOKEN, ServeProcess
from tests.rl.conftest import fresh_checkpoint, small_run
from tests.tolerances import FIRST_RATIO_FP32

pytestmark = [pytest.mark.netns, pytest.mark.xdist_group("ranks")]

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def test_the_cable_carries_and_is_cut_and_joined_again(cable: Cable) -> None:
    def reaches() -> bool:
        asks = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(5); "
        asks += f"s.connect(('{cable.addresses[1]}', 9)); s.send(b'?'); s.recv(1)"
        # A closed port of a host that is reached refuses; of one that is not, nothing comes back.
        asked = [*cable.hosts[0].command(), sys.executable, "-c", asks]
        return "ConnectionRefusedError" in subprocess.run(asked, capture_output=True, text=True, timeout=30).stderr

    assert reaches()
    cable.pull()
    assert not reaches()
    cable.plug()
    assert reaches()


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_jsonl(folder / "metrics.jsonl") if "loss" in record]


def test_ranks_on_two_hosts_train_as_on_one(cable: Cable, tmp_path: Path) -> None:
    make_inputs(tmp_path)
    model = [f"model.path={tmp_path / 'blank'}", "model.init_from_scratch=true", "model.layout=d2", "model.device=cpu"]
    run = ["archon", "sft", "total_steps=4", "batch_size=8", f"train_data.path={tmp_path}", "model.optimizer.lr=1e-3"]
    code, output, _ = torchrun(*run, *model, f"run_dir={tmp_path / 'one'}")
    assert code == 0, output

    nodes = []
    meet = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "two-hosts"]
    for host, address in enumerate(cable.addresses):
        own = ["--rdzv-endpoint", f"{cable.addresses[0]}:29400", "--local-addr", address]
        own += ["--rdzv-conf", f"is_host={'true' if host == 0 else 'false'}"]
        command = [
            *cable.hosts[host].command(),
            sys.executable,
            "-m",
            "torch.distributed.run",
            *meet,
            *own,
            "-m",
            *run,
            *model,
        ]
        nodes.append(
            subprocess.Popen(
                [*command, f"run_dir={tmp_path / 'two'}"],
                env=ENVIRONMENT | {"GLOO_SOCKET_IFNAME": cable.interfaces[host]},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        told = [node.communicate(timeout=240)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(told)
    assert len(losses(tmp_path / "one")) == 4 and losses(tmp_path / "two") == losses(tmp_path / "one")


def steps(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [record for record in read_jsonl(path) if "push/servers" in record] if path.exists() else []


def test_a_run_goes_on_while_the_host_of_a_server_is_cut_off(cable: Cable, blank: Path, tmp_path: Path) -> None:
    """A server next to the trainer and one on the other host, which leaves the fleet and comes back."""
    pushes, run_dir = tmp_path / "pushes", tmp_path / "run"
    pushes.mkdir()
    model = fresh_checkpoint(blank, tmp_path / "model")
    servers = [
        ServeProcess(model, pushes, tmp_path / f"log-{host}", before=cable.hosts[host].command(), host=address)
        for host, address in enumerate(cable.addresses)
    ]
    trainer = None
    try:
        urls = [server.wait() for server in servers]
        assert [url.split(":")[1] for url in urls] == [f"//{address}" for address in cable.addresses]
        run = small_run(blank, run_dir) | {"generator": None, "total_steps": 14}
        push = {"transport": "disk", "folder": str(pushes), "seconds": 10, "answer_seconds": 10}
        run["rollout"] |= {"servers": urls, "push": push}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
        with (tmp_path / "told").open("w") as told:
            trainer = subprocess.Popen(
                [
                    *cable.hosts[0].command(),
                    sys.executable,
                    "-m",
                    "archon",
                    "rl",
                    "--config",
                    str(tmp_path / "run.yaml"),
                ],
                env=ENVIRONMENT | {KEY: TOKEN},
                stdout=told,
                stderr=subprocess.STDOUT,
            )

        def wait_for(count: int) -> None:
            """Until a step pushed to so many servers, since the last change of the cable."""
            known, until = len(steps(run_dir)), time.monotonic() + 240
            while not any(step["push/servers"] == count for step in steps(run_dir)[known:]):
                assert trainer is not None and trainer.poll() is None, (tmp_path / "told").read_text()
                assert time.monotonic() < until, (tmp_path / "told").read_text()
                time.sleep(0.05)

        wait_for(2)
        cable.pull()
        wait_for(1)
        cable.plug()
        assert trainer.wait(240) == 0, (tmp_path / "told").read_text()
    finally:
        if trainer is not None and trainer.poll() is None:
            trainer.kill()
            trainer.wait()
        for server in servers:
            server.stop()
    done = steps(run_dir)
    reached = [int(step["push/servers"]) for step in done]
    assert reached[-1] == 2 and 1 in reached and set(reached) == {1, 2}
    assert [step["version"] for step in done] == list(range(1, 15)), "no step was lost, and none was trained twice"
    assert all(step["first_logprob_diff"] < FIRST_RATIO_FP32 for step in done), "answers of these weights alone"
