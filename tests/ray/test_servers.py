"""Servers on the nodes of a Ray cluster: they come up, are restarted elsewhere, and never outlive the trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from archon.remote.config import LaunchConfig
from archon.remote.http import Http
from archon.remote.launchers.base import Command
from archon.remote.launchers.launch import LaunchedServers
from archon.remote.launchers.ray_servers import RayHandle
from archon.schema.errors import ConfigError
from tests.ray.node import ROOT, RayNode
from tests.remote.test_launch import WEB, is_alive, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

CONFIG = LaunchConfig(count=2, launcher="ray", seconds=60)


def handles_of(launched: LaunchedServers) -> list[RayHandle]:
    return [handle for handle in launched.handles if isinstance(handle, RayHandle)]


def test_servers_come_up_on_nodes_and_end(ray: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launched = LaunchedServers(CONFIG, WEB, tmp_path / "servers")
    urls = launched.open()
    own = ray.util.get_node_ip_address()
    assert len(set(urls)) == 2 and all(url.startswith(f"http://{own}:") for url in urls)
    assert all(Http(url).is_listening() for url in urls)
    assert [handle.exit_message() for handle in launched.handles] == [None, None]
    launched.close()
    assert not any(Http(url).is_listening() for url in urls)
    assert "launched 2 archon servers" in capsys.readouterr().out


def test_a_server_that_ends_is_noticed_with_its_log_and_started_again(ray: Any, tmp_path: Path) -> None:
    launched = LaunchedServers(CONFIG.model_copy(update={"count": 1}), WEB, tmp_path)
    (url,) = launched.open()
    (handle,) = launched.handles
    port = url.rpartition(":")[2]
    for process in psutil.process_iter(["cmdline"]):
        if f"http.server {port}" in " ".join(process.info["cmdline"] or []):
            process.kill()
    assert "server-0 ended with status 137" in wait_for(handle.exit_message)
    handle.start()
    assert handle.exit_message() is None
    wait_for(Http(handle.url).is_listening)
    launched.close()
    assert not Http(handle.url).is_listening()


def test_a_server_whose_actor_dies_has_ended_and_leaves_nothing(ray: Any, tmp_path: Path) -> None:
    text = f"sleep 1000 & echo $$ $! > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pids; "
    listening = Command(["bash", "-c", f"trap '' TERM; {text} exec {sys.executable} -m http.server {{port}}"], {})
    launched = LaunchedServers(CONFIG.model_copy(update={"count": 1}), listening, tmp_path)
    launched.open()
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    actors = [p for p in psutil.process_iter(["cmdline"]) if "ray::ServerActor" in str(p.info["cmdline"])]
    assert len(actors) == 1 and all(map(is_alive, pids))
    actors[0].kill()
    (handle,) = launched.handles
    assert "was lost with its node or actor" in wait_for(handle.exit_message)
    wait_for(lambda: not any(map(is_alive, pids)))
    launched.close()


def test_a_server_whose_node_dies_has_ended_and_starts_on_another(ray: Any, node: RayNode, tmp_path: Path) -> None:
    other = RayNode(node.folder, head=node, resources='{"spare": 1}', cpus=2).wait()
    try:
        handle = RayHandle("server-0", WEB, tmp_path, {"spare": 1}, 60.0)
        handle.start()
        wait_for(Http(handle.url).is_listening)
        other.kill()
        assert "server-0 at http://" in (end := wait_for(handle.exit_message)) and "lost with its node" in end
        wait_for(lambda: not Http(handle.url).is_listening())
    finally:
        other.stop()
    other = RayNode(node.folder, head=node, resources='{"spare": 1}', cpus=2).wait()
    try:
        old = handle.url
        handle.start()
        assert handle.exit_message() is None and handle.url != old
        wait_for(Http(handle.url).is_listening)
        handle.stop()
        assert not Http(handle.url).is_listening()
    finally:
        other.stop()


def test_one_that_does_not_come_up_is_one_clear_error_and_leaves_nothing(ray: Any, tmp_path: Path) -> None:
    failing = Command(["bash", "-c", "echo out of memory; exit 3"], {})
    launched = LaunchedServers(CONFIG, failing, tmp_path)
    with pytest.raises(ConfigError, match=r"server-\d ended with status 3; the end of .*log:\nout of memory"):
        launched.open()
    greedy = CONFIG.model_copy(update={"resources": {"CPU": 1.0, "quantum": 1.0}, "seconds": 3.0})
    waiting = LaunchedServers(greedy, WEB, tmp_path)
    with pytest.raises(ConfigError, match=r"Ray did not schedule server-\d within 3 s; it needs .*quantum"):
        waiting.open()
    assert all(handle.exit_message() is None for handle in [*launched.handles, *waiting.handles]), "none is left"


def test_the_trainers_own_handler_of_sigterm_stays(node: RayNode) -> None:
    joined = (
        "import signal; from archon.remote.launchers.ray_cluster import join_cluster\n"
        "def own(*_): pass\n"
        "signal.signal(signal.SIGTERM, own); join_cluster('a test'); assert signal.getsignal(signal.SIGTERM) is own\n"
    )
    subprocess.run([sys.executable, "-c", joined], check=True, cwd=ROOT)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_nothing_outlives_a_trainer_that_is_killed(node: RayNode, tmp_path: Path, number: int) -> None:
    """The server, which ignores SIGTERM as if it were wedged, and its own child."""
    trainer = (
        "import sys, time\nfrom pathlib import Path\nfrom archon.remote.config import LaunchConfig\n"
        "from archon.remote.launchers.launch import LaunchedServers\nfrom archon.remote.launchers.base import Command\n"
        "folder = Path(sys.argv[1])\n"
        "text = f\"trap '' TERM; sleep 1000 & echo $$ $! > {folder}/new; mv {folder}/new {folder}/pids; \"\n"
        "text += f'exec {sys.executable} -m http.server {{port}}'\n"
        "LaunchedServers(LaunchConfig(launcher='ray', seconds=60), Command(['bash', '-c', text], {}), folder).open()\n"
        "print('open', flush=True)\ntime.sleep(1000)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", trainer, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    pids: list[int] = []
    try:
        assert process.stdout is not None
        assert any(line == "open\n" for line in process.stdout)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert all(map(is_alive, pids))
        process.send_signal(number)
        wait_for(lambda: not any(map(is_alive, pids)))
    finally:
        for pid in filter(is_alive, [process.pid, *pids]):
            os.kill(pid, signal.SIGKILL)
        process.communicate()
