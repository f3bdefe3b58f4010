"""Ray is not needed until it is asked for, and then its absence is one clear line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from archon.remote.config import LaunchConfig, WorkersConfig
from archon.remote.launchers import ray_cluster
from archon.remote.launchers.launch import LaunchedServers
from archon.remote.launchers.ray_cluster import actor_options, first_line
from archon.rl.rewards import AsyncRewardWrapper
from archon.schema.errors import ConfigError
from tests.remote.test_launch import WEB
from tests.rl.rewards import faulty


@pytest.mark.slow
def test_nothing_imports_ray_until_it_is_asked_for() -> None:
    code = "import sys, archon.rl.trainer, archon.remote.launchers.launch, archon.rl.workflows.agent"
    done = subprocess.run([sys.executable, "-c", f"{code}; assert 'ray' not in sys.modules"], capture_output=True)
    assert done.returncode == 0, done.stderr


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        ConfigError, match=r"^rollout.launch.launcher is ray, but the package cannot .*archon-engine\[ray\]"
    ):
        LaunchedServers(LaunchConfig(launcher="ray"), WEB, tmp_path).open()
    with pytest.raises(
        ConfigError, match=r"^rollout.workers.kind is ray, but the package cannot .*archon-engine\[ray\]"
    ):
        AsyncRewardWrapper(faulty.obey, workers=WorkersConfig(kind="ray"))


def test_an_address_of_a_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    monkeypatch.setattr(ray_cluster, "require_ray", lambda setting: type("Ray", (), {"is_initialized": lambda: False}))
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS is 'ray://127.0.0.1:10001', but the trainer must run"):
        ray_cluster.join_cluster("a test")


def test_resources_are_those_of_ray() -> None:
    assert actor_options(None) | {} == actor_options({"CPU": 1.0})
    options = actor_options({"GPU": 2.0, "rack": 1.0})
    assert (options["num_cpus"], options["num_gpus"], options["resources"]) == (0, 2.0, {"rack": 1.0})
    assert actor_options({"memory": 1e9}).items() >= {"memory": 1e9, "resources": {}}.items(), (
        "no custom resource of Ray's"
    )
    assert options["max_restarts"] == 0, "a server that Ray starts again would have other weights"


def test_settings_of_another_launcher_are_refused() -> None:
    with pytest.raises(ConfigError, match="resources needs launcher ray, but launcher is local"):
        LaunchConfig(resources={"GPU": 1})
    with pytest.raises(ConfigError, match="sbatch needs launcher slurm, but launcher is ray"):
        LaunchConfig(launcher="ray", sbatch=["--partition=gpu"])
    with pytest.raises(ConfigError, match="agents needs kind ray, but kind is local"):
        WorkersConfig(agents=2)


def test_an_error_of_ray_is_its_first_line() -> None:
    assert first_line(RuntimeError("\n  the actor died\nwith a trace")) == "the actor died"
    assert first_line(RuntimeError()) == "RuntimeError"
