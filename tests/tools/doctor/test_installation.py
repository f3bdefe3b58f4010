"""`archon doctor` without a checkpoint: what is installed, what is missing, and what to do."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from archon.schema.capacity import cores, rank_limit
from archon.tools.doctor.installation import MIN_DISK, OPTIONAL, Check, check_installation


def checks(port: int = 0) -> dict[str, Check]:
    return {check.subject: check for check in check_installation(port)}


def test_the_installation_of_the_tests_is_complete() -> None:
    found = checks()
    subjects = {
        "archon",
        "packages",
        "torch",
        "machine",
        "CPU kernels",
        "this folder",
        "cache",
        "shared memory",
        "port",
    }
    assert subjects <= set(found)
    installed = [
        check for name, check in found.items() if name.startswith(("packages", "extra", "torch", "CPU", "port"))
    ]
    assert [check for check in installed if check.status != "ok"] == []
    assert torch.__version__ in found["torch"].finding
    assert f"{cores():g} processors" in found["machine"].finding
    assert f"at most {rank_limit()} ranks, 8 per processor and 256 MiB each" in found["machine"].finding
    assert found["extra plots"].finding == "installed: curves in reports"
    assert {name.removeprefix("extra ") for name in found if name.startswith("extra ")} == set(OPTIONAL)


def test_each_extra_is_one_of_the_package() -> None:
    assert set(OPTIONAL) <= set(importlib.metadata.metadata("archon-engine").get_all("Provides-Extra") or [])


def test_missing_and_outdated_packages_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = [
        "numpy>=1.26",
        "never-published>=1",
        'torch<2; extra == "rl"',
        'never-published; extra == "ray"',
        'numpy; extra == "gguf"',
        'never-published-either; python_version > "3"',
        'never-published; python_version < "3"',
        'never-published; python_version < "3" and extra == "plots"',
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requirements)
    found = checks()
    assert found["packages"] == Check(
        "problem", "packages", "never-published, never-published-either missing: pip install archon-engine"
    )
    assert found["extra rl"].status == "problem"
    assert (
        f"torch {torch.__version__} is installed, expected <2: pip install 'archon-engine[rl]'"
        in found["extra rl"].finding
    )
    assert found["extra ray"].status == "missing" and "pip install 'archon-engine[ray]'" in found["extra ray"].finding
    assert found["extra gguf"].status == found["extra plots"].status == "ok"


def test_extras_for_gpus_are_useless_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ['never-published; extra == "fla"'])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    use = OPTIONAL["fla"]
    assert checks()["extra fla"] == Check("ok", "extra fla", f"not installed, and useless without a GPU: {use}")


def test_a_full_disk_and_a_port_in_use_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=MIN_DISK - 1))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = checks(port)
    assert found["port"] == Check(
        "problem", "port", f"127.0.0.1:{port} cannot be used (Address already in use): archon serve --port 0"
    )
    assert found["this folder"].status == found["cache"].status == "problem"
    assert str(Path.cwd()) in found["this folder"].finding


@pytest.mark.parametrize(("build", "advice"), [(None, "install the build"), ("13.0", "nvidia-smi")])
def test_a_gpu_that_torch_cannot_use_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, build: str | None, advice: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl" or exists(path))
    monkeypatch.setattr(torch.version, "cuda", build)
    found = checks()["torch"]
    assert found.status == "problem" and advice in found.finding


@pytest.mark.parametrize(
    ("environment", "arguments", "code", "said"),
    [
        ({"CC": "/nonexistent/cc"}, [], 1, "problem  CPU kernels        cannot be compiled"),
        ({}, ["--layout", "d2"], 2, "--layout needs PATH, a checkpoint"),
    ],
)
def test_the_command_fails_if_there_is_a_problem(
    tmp_path: Path, environment: dict[str, str], arguments: list[str], code: int, said: str
) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), **environment}
    run = subprocess.run(
        [sys.executable, "-m", "archon", "doctor", *arguments], env=environment, capture_output=True, text=True
    )
    assert run.returncode == code, run.stderr
    assert said in run.stdout + run.stderr
