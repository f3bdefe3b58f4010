"""Where a measurement comes from and how its numbers spread; imports neither torch nor transformers."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import Field

from archon.schema.config import StrictModel

ROOT = Path(__file__).resolve().parents[2]
# Files that no measurement depends on, as git is told to leave them out.
NOT_MEASURED = (":!benchmarks/records", ":!*.md")
PACKAGES = ("torch", "transformers", "torchtitan", "megatron-core", "trl", "accelerate", "safetensors", "numpy")


class Machine(StrictModel):
    """Where it ran."""

    cpu: str
    cores: int = Field(ge=1, description="cores this process may use")
    memory_bytes: int
    gpus: list[str] = Field(default_factory=list, description="name and driver of each GPU")


class Check(StrictModel):
    """A comparison that had to hold before anything was timed."""

    what: str
    peer: str
    difference: float = Field(description="relative; 0 where equality was demanded")
    tolerance: float


class Spread(StrictModel):
    """One side's numbers over the rounds, and the memory it took."""

    unit: str
    median: float
    min: float
    max: float
    values: list[float]
    memory_bytes: dict[str, int] = Field(default_factory=dict, description="largest over the rounds, by kind")


def spread(values: Sequence[float], unit: str, runs: Sequence[Mapping[str, Any]] = ()) -> Spread:
    """Median, minimum and maximum of `values`, with the largest of each kind of memory that `runs` report."""
    memory: dict[str, int] = {}
    for run in runs:
        for kind, size in run.get("memory", {}).items():
            memory[kind] = max(memory.get(kind, 0), size)
    return Spread(
        unit=unit,
        median=statistics.median(values),
        min=min(values),
        max=max(values),
        values=list(values),
        memory_bytes=memory,
    )


def relative_difference(ours: float, theirs: float) -> float:
    """|a - b| / |b|."""
    return abs(ours - theirs) / max(abs(theirs), 1e-30)


def origin(command: str) -> dict[str, Any]:
    """What every record says of its making: command, commit, date (UTC), versions and machine."""
    return {
        "command": command,
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "versions": versions(),
        "machine": machine(),
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide a measurement, those that are installed."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the checkout, with `+` when tracked files differ from it, records and pages apart: a run writes
    them. `unknown` outside a checkout."""
    if not (ROOT / ".git").exists():
        return "unknown"
    head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no", "--", ".", *NOT_MEASURED],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def machine() -> Machine:
    """Processor, cores, memory and GPUs of this machine."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    gpus: list[str] = []
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True
        )
        gpus = listed.stdout.strip().splitlines() if listed.returncode == 0 else []
    except FileNotFoundError:
        pass
    return Machine(cpu=cpu, cores=len(os.sched_getaffinity(0)), memory_bytes=pages * size, gpus=gpus)
