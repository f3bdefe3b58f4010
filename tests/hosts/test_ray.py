"""A Ray cluster over two hosts: the trainer on one, its servers and reward workers on the other, which is cut off."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from archon.training.metrics import read_jsonl
from benchmarks.namespaces import Cable
from tests.hosts.test_hosts import ENVIRONMENT
from tests.ray.node import ROOT, RayNode
from tests.rl.conftest import small_run
from tests.test_readme import shown
from tests.tolerances import FIRST_RATIO_FP32

pytestmark = [pytest.mark.netns, pytest.mark.xdist_group("ranks")]

NOTICED_SECONDS = 15.0  # in which the head gives up a host that is cut off, with the periods of tests/ray/node.py
FAR = '{"far": 8}'


@pytest.fixture
def guide() -> list[str]:
    """The guide's commands: to start the head, to start a node, to run."""
    lines = shown("ray", "bash").replace("\\\n", "").splitlines()
    return [line for line in lines if not line.startswith("#")]


@pytest.fixture
def nodes(cable: Cable, guide: list[str]) -> Iterator[list[RayNode]]:
    """The head on the first host, and a node with the resource `far` on the second; the test may replace that."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    started: list[RayNode] = []
    try:
        head = RayNode(folder, start=guide[0], ip=cable.addresses[0], cpus=2, before=cable.hosts[0].command())
        started.append(head)
        started.append(far_node(cable, head.wait(), guide))
        yield started
    finally:
        for node in reversed(started):
            node.stop()
        shutil.rmtree(folder, ignore_errors=True)


def far_node(cable: Cable, head: RayNode, guide: list[str]) -> RayNode:
    """A node on the second host."""
    start = guide[1].replace("HEAD", cable.addresses[0])
    before = cable.hosts[1].command()
    return RayNode(head.folder, start=start, ip=cable.addresses[1], head=head, resources=FAR, before=before).wait()


def steps(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    return [record for record in read_jsonl(path) if "push/servers" in record] if path.exists() else []


@pytest.mark.timeout(900)
def test_a_run_goes_on_after_the_node_of_its_servers_was_cut_off(
    cable: Cable, nodes: list[RayNode], guide: list[str], blank: Path, tmp_path: Path
) -> None:
    run_dir, told_path = tmp_path / "run", tmp_path / "told"
    run = small_run(blank, run_dir) | {"generator": None, "total_steps": 200}
    run["rollout"] |= {"push": {"transport": "disk", "seconds": 10, "answer_seconds": 10}}
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(run))
    line = guide[2].replace("HEAD", cable.addresses[0]).replace("/shared/me", str(tmp_path))
    line = line.replace("vllm, count: 8", "archon, count: 2, args: [device=cpu], seconds: 240")
    line = line.replace("{GPU: 1}", "{far: 1}").replace("kind: ray", "kind: ray, rewards: 2, resources: {far: 1}")
    setting, program, *arguments = shlex.split(line)
    with told_path.open("w") as told:
        trainer = subprocess.Popen(
            [*cable.hosts[0].command(), sys.executable, "-m", program, *arguments],
            cwd=tmp_path,
            env=ENVIRONMENT | {"PYTHONPATH": str(ROOT)} | dict([setting.split("=")]),
            stdout=told,
            stderr=subprocess.STDOUT,
        )

    def wait_for(condition: Callable[[], Any], seconds: float = 300) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert trainer.poll() is None and time.monotonic() < until, told_path.read_text()
            time.sleep(0.1)

    try:
        wait_for(lambda: len(steps(run_dir)) >= 3)
        told_text = told_path.read_text()
        assert f"launched 2 archon servers: http://{cable.addresses[1]}:" in told_text
        cable.pull()
        pulled = time.monotonic()
        wait_for(lambda: "restarting " in told_path.read_text())
        wait_for(lambda: time.monotonic() - pulled > NOTICED_SECONDS)
        before = len(steps(run_dir))
        cable.plug()
        wait_for(lambda: nodes[1].process.poll() is not None)  # Ray ends a node that it gave up
        nodes[1].stop()
        nodes[1] = far_node(cable, nodes[0], guide)
        wait_for(lambda: len(steps(run_dir)) >= before + 3)
        trainer.terminate()
        assert trainer.wait(120) == 128 + signal.SIGTERM, told_path.read_text()
    finally:
        if trainer.poll() is None:
            trainer.kill()
            trainer.wait()
    done = steps(run_dir)
    assert [step["version"] for step in done] == list(range(1, len(done) + 1)), "none was lost, none trained twice"
    assert all(step["first_logprob_diff"] < FIRST_RATIO_FP32 for step in done), "answers of these weights alone"
    assert done[-1]["push/servers"] >= 1
    left = [process for process in psutil.process_iter(["cmdline"]) if cable.addresses[1] in _command(process)]
    assert not any("serve" in _command(process) for process in left), left


def _command(process: psutil.Process) -> str:
    return " ".join(process.info["cmdline"] or [])
