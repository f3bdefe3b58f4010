"""Origin of a measurement (command, commit, machine) and statistics of its values. Does not import torch."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import Field

from archon.schema.children import child_environment
from archon.schema.config import StrictModel

ROOT = Path(__file__).resolve().parents[3]
# Git pathspecs that exclude files without influence on measurements.
EXCLUDED_PATHS = (":!benchmarks/records", ":!*.md")
PACKAGES = (
    *("torch", "triton", "flash-attn-4", "torchao", "transformers", "liger-kernel", "peft", "torchtitan"),
    *("megatron-core", "trl", "accelerate", "safetensors", "numpy"),
)


class Machine(StrictModel):
    """Machine of a measurement."""

    cpu: str
    cores: int = Field(ge=1, description="cores this process may use")
    memory_bytes: int
    gpus: list[str] = Field(default_factory=list, description="name and driver of each GPU")


class NumericCheck(StrictModel):
    """Comparison that passed before steps were timed."""

    what: str
    peer: str
    difference: float = Field(description="relative difference; 0 if equality was required")
    tolerance: float


class Spread(StrictModel):
    """Statistics of repeated runs, and their memory."""

    unit: str
    median: float
    min: float
    max: float
    values: list[float]
    memory_bytes: dict[str, int] = Field(default_factory=dict, description="maximum over the runs, by kind")


def spread(values: Sequence[float], unit: str, runs: Sequence[Mapping[str, Any]] = ()) -> Spread:
    """Return statistics of `values`, and the maximum of each kind of memory in `runs`."""
    return Spread(
        unit=unit,
        median=statistics.median(values),
        min=min(values),
        max=max(values),
        values=list(values),
        memory_bytes=max_by_name([run.get("memory", {}) for run in runs]),
    )


def max_by_name(sizes: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the maximum of the values of each name."""
    peaks: dict[str, int] = {}
    for by_name in sizes:
        for name, size in by_name.items():
            peaks[name] = max(peaks.get(name, 0), size)
    return peaks


def relative_difference(value: float, reference: float) -> float:
    """Return |value - reference| / |reference|."""
    return abs(value - reference) / max(abs(reference), 1e-30)


def origin(command: str) -> dict[str, Any]:
    """Return the common fields of records: command, commit, date (UTC), versions and machine."""
    return {
        "command": command,
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "versions": versions(),
        "machine": machine(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that affect measurements."""
    installed = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


def commit() -> str:
    """Return the commit of the checkout, with `+` if tracked files differ.

    Outside a checkout it is `ARCHON_COMMIT`, or `unknown`. Records and Markdown pages do not count, because a run
    writes them.
    """
    if not (ROOT / ".git").exists():
        return os.environ.get("ARCHON_COMMIT", "unknown")

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, env=child_environment()
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *EXCLUDED_PATHS)
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def processor(info: str) -> str:
    """Return name, family and model from the text of /proc/cpuinfo.

    Virtual machines report the bare name `AMD EPYC` for processors that differ by half in speed.
    """
    lines = (line.partition(":") for line in info.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in lines}
    numbers = ", ".join(
        f"{name} {fields[key]}" for name, key in (("family", "cpu family"), ("model", "model")) if key in fields
    )
    return fields.get("model name", "unknown") + (f" ({numbers})" if numbers else "")


def machine() -> Machine:
    """Return processor, cores, memory and GPUs of this machine."""
    cpu = processor(Path("/proc/cpuinfo").read_text())
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    gpus: list[str] = []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    with suppress(FileNotFoundError):
        listed = subprocess.run(query, capture_output=True, text=True, env=child_environment())
        gpus = listed.stdout.strip().splitlines() if listed.returncode == 0 else []
    return Machine(cpu=cpu, cores=len(os.sched_getaffinity(0)), memory_bytes=pages * size, gpus=gpus)
