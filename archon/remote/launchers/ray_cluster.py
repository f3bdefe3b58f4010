"""The cluster of Ray that this process drives: the package is imported, and the cluster joined, on first use."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from archon.schema.errors import ConfigError

_joining = threading.Lock()


def require_ray(setting: str) -> Any:
    """Return the module `ray`. Raises ConfigError, naming the `setting` that asks for it, where it is missing."""
    try:
        with _keep_sigterm_handler():
            return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"{setting} is ray, and its package cannot be imported ({error}); install archon's extra `ray`: "
            "pip install 'archon-engine[ray]'"
        ) from None


def join_cluster(setting: str) -> Any:
    """Return the module `ray`, connected to the cluster at RAY_ADDRESS, by default to that of this machine.

    Never starts a cluster. Raises ConfigError, naming the `setting` that asks for one, where there is none.
    """
    ray = require_ray(setting)
    with _joining:
        if ray.is_initialized():
            return ray
        address = os.environ.get("RAY_ADDRESS") or "auto"
        if "://" in address:
            raise ConfigError(
                f"RAY_ADDRESS is {address!r}, and the trainer is a driver on a node of the cluster, no client; "
                "start it where `ray start` has run, with host:port"
            )
        try:
            with _keep_sigterm_handler():
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"{setting} is ray, and no cluster was joined at {address!r} ({reason}); start one by `ray start "
                "--head`, and name it by RAY_ADDRESS=host:port"
            ) from None
    return ray


def actor_options(resources: Mapping[str, float] | None) -> dict[str, Any]:
    """Return the options of an actor that takes `resources` of a node, by default a CPU, and that Ray never starts
    again by itself.
    """
    resources = {"CPU": 1.0} if resources is None else resources
    others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU", "memory")}
    return {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "memory": resources.get("memory"),
        "resources": others,
        "scheduling_strategy": "SPREAD",
        "max_restarts": 0,
        "max_task_retries": 0,
    }


def first_line(error: BaseException) -> str:
    """Return what an error of Ray says, without the traces that it carries along."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line), type(error).__name__)


@contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Keep the handler of SIGTERM, which Ray would replace: a run that is told to end saves itself first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
