"""Connection to a Ray cluster; Ray is imported on first use."""

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
    """Return the module `ray`. Raises ConfigError with the name of the `setting` if it is not installed."""
    try:
        with _keep_sigterm_handler():
            return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"{setting} is ray, but the package cannot be imported ({error}); install archon's extra `ray`: "
            "pip install 'archon-engine[ray]'"
        ) from None


def join_cluster(setting: str) -> Any:
    """Return the module `ray`, connected to the cluster at RAY_ADDRESS, by default this machine's cluster.

    A cluster is never started. Raises ConfigError with the name of the `setting` if there is none.
    """
    ray = require_ray(setting)
    with _joining:
        if ray.is_initialized():
            return ray
        address = os.environ.get("RAY_ADDRESS") or "auto"
        if "://" in address:
            raise ConfigError(
                f"RAY_ADDRESS is {address!r}, but the trainer must run on a node of the cluster, not as a Ray client; "
                "start it on a node where `ray start` has run, and set RAY_ADDRESS=host:port"
            )
        try:
            with _keep_sigterm_handler():
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"{setting} is ray, but no cluster answers at {address!r} ({reason}); start one with `ray start "
                "--head`, and set RAY_ADDRESS=host:port"
            ) from None
    return ray


def actor_options(resources: Mapping[str, float] | None) -> dict[str, Any]:
    """Return options of an actor with `resources`, by default one CPU; Ray never restarts it."""
    resources = {"CPU": 1.0} if resources is None else resources
    custom = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU", "memory")}
    return {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "memory": resources.get("memory"),
        "resources": custom,
        "scheduling_strategy": "SPREAD",
        "max_restarts": 0,
        "max_task_retries": 0,
    }


def first_line(error: BaseException) -> str:
    """Return the message of a Ray error without its embedded traceback."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line), type(error).__name__)


@contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces: a run saves a checkpoint on SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
