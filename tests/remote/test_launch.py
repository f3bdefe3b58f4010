"""Servers that a run starts: they come up, are restarted, and never outlive it, on this machine and under Slurm."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from archon.remote import supervisor
from archon.remote.config import LaunchConfig
from archon.remote.http import KEY, Http
from archon.remote.launchers.base import Command, LocalHandle, command
from archon.remote.launchers.launch import LaunchedServers
from archon.remote.launchers.slurm import SlurmHandle, script
from archon.rl import RLTrainer
from archon.rl.config import RLConfig
from archon.schema.errors import ConfigError
from archon.training.metrics import read_jsonl
from tests.rl.conftest import small_run
from tests.test_readme import ROOT, shown
from tests.tolerances import FIRST_RATIO_FP32, SOON_SECONDS

WEB = Command([sys.executable, "-m", "http.server", "{port}", "--bind", "{host}"], {"MARK": "a 'quoted' value"})
CONFIG = LaunchConfig(count=2, seconds=60)


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")


def is_alive(pid: int) -> bool:
    """Whether a process runs, and is not only waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], Any], seconds: float = 30) -> Any:
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


def server_with_a_child(folder: Path, *, deaf: bool) -> list[str]:
    """A command that writes its process id and its child's; a deaf one ignores SIGTERM as if it were wedged."""
    trap = "trap '' TERM; " if deaf else ""
    return ["bash", "-c", f"{trap}setsid sleep 1000 & echo $$ $! > {folder}/new; mv {folder}/new {folder}/pids; wait"]


def pids_of_server(folder: Path) -> list[int]:
    wait_for((folder / "pids").exists)
    return [int(pid) for pid in (folder / "pids").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_nothing_outlives_a_trainer_that_is_killed(tmp_path: Path, number: int) -> None:
    """The server, and its child in another session."""
    trainer = (
        "import sys, time, pathlib; from archon.remote.launchers.base import Command, LocalHandle\n"
        "LocalHandle('server-0', Command(sys.argv[2:], {}), pathlib.Path(sys.argv[1])).start(); time.sleep(1000)\n"
    )
    command = server_with_a_child(tmp_path, deaf=number == signal.SIGKILL)
    process = subprocess.Popen([sys.executable, "-c", trainer, str(tmp_path), *command], cwd=ROOT)
    pids: list[int] = []
    try:
        pids = pids_of_server(tmp_path)
        process.send_signal(number)
        wait_for(lambda: not any(map(is_alive, pids)))
    finally:
        for pid in filter(is_alive, [process.pid, *pids]):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def test_children_of_a_server_that_is_killed_end_with_it(tmp_path: Path) -> None:
    handle = LocalHandle("server-0", Command(server_with_a_child(tmp_path, deaf=False), {}), tmp_path)
    handle.start()
    server, child = pids_of_server(tmp_path)
    os.kill(server, signal.SIGKILL)
    wait_for(lambda: not is_alive(child))
    assert str(handle.exit_message()).startswith("server-0 ended with status 137; ")
    handle.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_a_server_of_slurm_ends_with_its_supervisor(tmp_path: Path, number: int) -> None:
    (tmp_path / "heartbeat").touch()
    options = ["--heartbeat", str(tmp_path / "heartbeat"), "100", "--"]
    command = ["bash", "-c", f"sleep 1000 & echo $$ $! > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pids; wait"]
    process = subprocess.Popen([sys.executable, supervisor.__file__, *options, *command])
    pids: list[int] = []
    try:
        pids = pids_of_server(tmp_path)
        process.send_signal(number)
        # A server dies with its supervisor (PR_SET_PDEATHSIG); Slurm kills its children when the job ends.
        wait_for(lambda: not any(map(is_alive, pids[:1] if number == signal.SIGKILL else pids)))
        process.wait(SOON_SECONDS)
    finally:
        for pid in filter(is_alive, [process.pid, *pids]):
            os.kill(pid, signal.SIGKILL)


def test_local_servers_come_up_and_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launched = LaunchedServers(CONFIG, WEB, tmp_path / "servers")
    urls = launched.open()
    assert len(set(urls)) == 2 and all(Http(url).is_listening() for url in urls)
    launched.close()
    assert not any(Http(url).is_listening() for url in urls)
    assert "launched 2 archon servers" in capsys.readouterr().out


def test_a_server_that_does_not_come_up_is_one_clear_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Command(["bash", "-c", "echo out of memory; exit 3"], {})
    launched = LaunchedServers(CONFIG, failing, tmp_path)
    with pytest.raises(ConfigError, match=r"server-\d ended with status 3; the end of .*log:\nout of memory"):
        launched.open()
    silent = LaunchedServers(LaunchConfig(seconds=0.5), Command(["sleep", "1000"], {}), tmp_path / "silent")
    with pytest.raises(ConfigError, match=r"server-0 did not listen at http://127.0.0.1:\d+ within 0.5 s"):
        silent.open()
    missing = LaunchedServers(CONFIG, Command(["no-such-program"], {}), tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"cannot start server-\d \(no-such-program\): .*No such file"):
        missing.open()
    many = LaunchedServers(LaunchConfig(count=1024), WEB, tmp_path / "many")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(ConfigError, match=r"count: 1024 servers do not fit this machine, which runs at most \d+: 8 on"):
        many.open()
    handles = [*launched.handles, *silent.handles, *missing.handles, *many.handles]
    assert all(handle.exit_message() is None for handle in handles), "none is left"


def test_each_engine_is_started_so_that_it_takes_pushes(tmp_path: Path) -> None:
    wanted = {
        "archon": ["--push-root", str(tmp_path), "dtype=bfloat16", "--port", "{port}"],
        "vllm": ["--enable-scale-out", "--worker-extension-cls", "--weight-transfer-config", "bfloat16"],
        "sglang": ["--model-path", "M", "--dtype", "bfloat16"],
    }
    for engine, arguments in wanted.items():
        made = command(LaunchConfig(engine=engine, args=["--own"]), "M", tmp_path, "bfloat16", None)  # type: ignore[arg-type]
        assert set(arguments) < set(made.arguments) and made.arguments[-1] == "--own"
        assert "secret" not in made.arguments, "which every user of the machine could read"
    loras = command(LaunchConfig(engine="vllm", command=["my", "vllm"]), "M", tmp_path, "float32", 16)
    assert loras.arguments[:2] == ["my", "vllm"] and "--enable-lora" in loras.arguments
    assert loras.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The log of commands given to stand-ins of Slurm's, which run a job as a process here."""
    log, folder = tmp_path / "commands", tmp_path / "bin"
    folder.mkdir()
    jobs = tmp_path / "jobs"
    programs = {
        "hostname": "echo 127.0.0.1",
        "sbatch": f'"{sys.executable}" - "$2" <<\'END\'\n'
        "import os, subprocess, sys\n"
        "path = sys.argv[1]\n"
        "log = next(x.split('=', 1)[1].strip() for x in open(path) if x.startswith('#SBATCH --output='))\n"
        "job = subprocess.Popen(['bash', path], stdout=open(log, 'a'), stderr=subprocess.STDOUT,\n"
        "    env=os.environ | {'SLURM_JOB_ID': str(os.getpid())}, start_new_session=True)\n"
        f"open('{jobs}', 'a').write(f'{{job.pid}}\\n')\n"
        "print(f'{job.pid};cluster')\nEND",
        "squeue": 'kill -0 "${3#--jobs=}" 2>/dev/null && echo RUNNING || true',
        "scancel": 'kill "$1"',
    }
    for name, text in programs.items():
        path = folder / name
        path.write_text(f'#!/bin/bash\necho {name} "$@" >> {log}\n{text}\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    yield log
    for job in jobs.read_text().split() if jobs.exists() else []:
        if is_alive(int(job)):
            os.killpg(int(job), signal.SIGKILL)


def test_servers_as_jobs_of_slurm(slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("archon.remote.launchers.slurm.QUEUE_SECONDS", 0.0)
    config = LaunchConfig(launcher="slurm", sbatch=["--partition=gpu"], seconds=60)
    folder = tmp_path / "shared folder"
    launched = LaunchedServers(config, WEB, folder)
    (url,) = launched.open()
    assert Http(url).is_listening()
    written = (folder / "server-0.sh").read_text()
    assert "#SBATCH --partition=gpu\n" in written and "secret" not in written
    handle = launched.handles[0]
    assert isinstance(handle, SlurmHandle) and handle.exit_message() is None
    launched.close()
    wait_for(lambda: not Http(url).is_listening())
    done = [line.split()[0] for line in slurm.read_text().splitlines()]
    assert done[0] == "sbatch" and done[-1] == "scancel" and "squeue" in done
    # A trainer that is gone touches no heartbeat: the job ends by itself.
    left = LaunchedServers(config, WEB, folder)
    (url,) = left.open()
    left.handles[0]._stop_event.set()  # type: ignore[attr-defined]
    os.utime(folder / "heartbeat", (0, 0))
    wait_for(lambda: not Http(url).is_listening())


def test_a_job_lives_on_while_nobody_watches_it(slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before the first push and during a long one."""
    monkeypatch.setattr("archon.remote.launchers.slurm.HEARTBEAT_SECONDS", 2.0)
    monkeypatch.setattr("archon.remote.launchers.slurm.HEARTBEAT_INTERVAL", 0.2)
    launched = LaunchedServers(LaunchConfig(launcher="slurm", seconds=60), WEB, tmp_path)
    (url,) = launched.open()
    time.sleep(4)
    assert Http(url).is_listening()
    launched.close()
    wait_for(lambda: not Http(url).is_listening())


def test_a_job_in_the_queue_does_not_delay_the_end_of_a_run(slurm: Path, tmp_path: Path) -> None:
    queued = tmp_path / "bin" / "sbatch"
    queued.write_text("#!/bin/bash\nsleep 60 >/dev/null 2>&1 &\necho $!\n")
    handle = SlurmHandle("server-0", WEB, tmp_path, [], 60)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(handle.start)
        wait_for(lambda: slurm.exists() or bool(list(tmp_path.glob("*.sh"))))
        time.sleep(0.5)
        handle.stop()
        with pytest.raises(ConfigError, match="server-0 was stopped before its job began"):
            starting.result(SOON_SECONDS)


def test_a_script_of_slurm_is_what_a_shell_reads(tmp_path: Path) -> None:
    text = script("server-3", WEB, tmp_path, ["--gres=gpu:1"], python="python3")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=archon-server-3\n") and "#SBATCH --gres=gpu:1" in text
    assert text.rstrip().endswith(f"{sys.executable} -m http.server $PORT --bind 0.0.0.0")


def test_without_slurm_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="launcher is slurm, but sbatch is not on PATH"):
        LaunchedServers(LaunchConfig(launcher="slurm"), WEB, tmp_path).open()


@pytest.mark.slow
def test_the_command_of_the_guide_trains_on_jobs_of_slurm(slurm: Path, blank: Path, tmp_path: Path) -> None:
    lines = shown("slurm", "bash").replace("\\\n", "").replace("/shared/me", str(tmp_path))
    program, *arguments = shlex.split(lines.replace("vllm, count: 8", "archon, count: 2, args: [device=cpu]"))
    run = small_run(blank, tmp_path / "run") | {"generator": None, "total_steps": 2}
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(run))
    done = subprocess.run(
        [sys.executable, "-m", program, *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["step"] == 2 and last["push/servers"] == 2
    asked = [line.split()[0] for line in slurm.read_text().splitlines()]
    assert asked.count("sbatch") == 2 and asked.count("scancel") == 2
    assert "#SBATCH --gres=gpu:1\n" in (tmp_path / "pushes" / "servers" / "server-1.sh").read_text()


@pytest.mark.slow
def test_a_run_on_launched_servers_survives_the_death_of_one(
    rl_config: Callable[..., RLConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = rl_config(total_steps=30)
    run = config.model_dump() | {"generator": None}
    run["rollout"] |= {"launch": {"count": 2, "args": ["device=cpu"], "seconds": 120}}
    trainer = RLTrainer(RLConfig.parse(run))
    with trainer.opened():
        engine = trainer.generator
        urls = [server.url for server in engine.servers]
        steps = [trainer.train_step()]
        port = urls[0].rpartition(":")[2]
        found = subprocess.run(["pgrep", "-f", f"archon serve .*--port {port} "], capture_output=True, text=True)
        served = [int(pid) for pid in found.stdout.split()]
        assert served
        for pid in served:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: engine.servers[0].failure is not None)
        steps.append(trainer.train_step())
        wait_for(lambda: engine.servers[0].failure is None, 120)
        steps.append(trainer.train_step())
    assert [step["push/servers"] for step in steps][-1] == 2 and engine.stats.returned == 1
    assert all(step["first_logprob_diff"] < FIRST_RATIO_FP32 for step in steps)
    assert not any(Http(url).is_listening() for url in urls)
