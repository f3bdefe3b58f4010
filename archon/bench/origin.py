"""The origin of a measurement (command, commit, machine) and statistics of its values. Does not import torch."""

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
# Git pathspecs that exclude files on which no measurement depends.
NOT_MEASURED = (":!benchmarks/records", ":!*.md")
PACKAGES = ("torch", "transformers", "torchtitan", "megatron-core", "trl", "accelerate", "safetensors", "numpy")


class Machine(StrictModel):
    """The machine of a measurement."""

    cpu: str
    cores: int = Field(ge=1, description="cores this process may use")
    memory_bytes: int
    gpus: list[str] = Field(default_factory=list, description="name and driver of each GPU")


class NumericCheck(StrictModel):
    """A comparison that had to hold before the timed steps."""

    what: str
    peer: str
    difference: float = Field(description="relative; 0 where equality was required")
    tolerance: float


class Spread(StrictModel):
    """Statistics of one side's values over the rounds, and its memory."""

    unit: str
    median: float
    min: float
    max: float
    values: list[float]
    memory_bytes: dict[str, int] = Field(default_factory=dict, description="maximum over the rounds, by kind")


def spread(values: Sequence[float], unit: str, runs: Sequence[Mapping[str, Any]] = ()) -> Spread:
    """Returns statistics of `values`, and the maximum of each kind of memory in `runs`."""
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
    """Returns |ours - theirs| / |theirs|."""
    return abs(ours - theirs) / max(abs(theirs), 1e-30)


def origin(command: str) -> dict[str, Any]:
    """Returns the fields that every record has: command, commit, date (UTC), versions and machine."""
    return {
        "command": command,
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "versions": versions(),
        "machine": machine(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages that affect measurements."""
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Returns the commit of the checkout, with `+` if tracked files differ from it; `unknown` outside a checkout.

    Records and Markdown pages are ignored, because a run writes them.
    """
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
    """Returns processor, cores, memory and GPUs of this machine."""
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
