"""Checks of an installation: PyTorch and its devices, memory, the C compiler, optional packages, folders and ports."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from packaging.requirements import Requirement

import archon
from archon.schema.capacity import GIB, RANK_BYTES, RANKS_PER_CORE, cores, memory_bytes, rank_limit

OPTIONAL = {
    "rl": "RL, agents, servers and the hub's datasets",
    "vision": "images",
    "plots": "curves in reports",
    "ray": "servers and rewards on a Ray cluster",
    "tinker": "archon serve-training",
    "gguf": "archon convert --to gguf",
    "megatron": "archon bench next to megatron-core",
    "fp8": "FP8 on a GPU, int8 moments",
    "flash-attn-4": "the fastest attention on Hopper and later GPUs",
    "fla": "kernels of delta nets on a GPU",
}
"""Extras that users choose, and their purpose."""
GPU_ONLY = ("flash-attn-4", "fla")
MIN_DISK = 2 * GIB
"""Minimum free bytes of a folder, for checkpoints, export and report of a small model."""
MIN_SHARED_MEMORY = 2**26
"""Bytes of Docker's default /dev/shm, which is too small for pushes and for NCCL."""


class Check(NamedTuple):
    """A finding about the installation.

    Attributes:
        status: "ok"; "missing" for an optional part; "problem" for a part that stops runs or slows them down.
        subject: Name of the part.
        finding: Its value, and the advice unless the status is "ok".
    """

    status: Literal["ok", "missing", "problem"]
    subject: str
    finding: str


def check_installation(port: int = 8000) -> Iterator[Check]:
    """Yield the checks of this machine and environment.

    Args:
        port: port of loopback that `archon serve` would use.
    """
    yield Check(
        "ok", "archon", f"{archon.__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}"
    )
    yield from _packages(None)
    yield from _devices()
    yield _processor_and_memory()
    yield _compiler()
    yield from _folders()
    yield _port(port)
    for extra in OPTIONAL:
        yield from _packages(extra)


def _packages(extra: str | None) -> Iterator[Check]:
    """Compare the installed packages with the requirements of archon, or of one of its extras."""
    try:
        texts = importlib.metadata.requires("archon-engine") or []
    except importlib.metadata.PackageNotFoundError:
        yield Check("problem", "packages", "archon runs from its folder and is not installed: pip install -e .")
        return
    missing, wrong = [], []
    for requirement in map(Requirement, texts):
        marker = requirement.marker
        for_all = marker is None or marker.evaluate({"extra": ""})
        for_extra = marker is not None and not for_all and marker.evaluate({"extra": extra or ""})
        if not (for_all if extra is None else for_extra):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(requirement.name)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is installed, expected {requirement.specifier}")
    subject = f"extra {extra}" if extra else "packages"
    install = f"pip install 'archon-engine[{extra}]'" if extra else "pip install archon-engine"
    if wrong:
        yield Check("problem", subject, f"{'; '.join(wrong)}: {install}")
    elif missing and extra:
        if extra in GPU_ONLY and not torch.cuda.is_available():
            yield Check("ok", subject, f"not installed, and useless without a GPU: {OPTIONAL[extra]}")
        else:
            yield Check("missing", subject, f"for {OPTIONAL[extra]}: {install}")
    elif missing:
        yield Check("problem", subject, f"{', '.join(missing)} missing: {install}")
    else:
        yield Check("ok", subject, f"installed: {OPTIONAL[extra]}" if extra else "all requirements are installed")


def _devices() -> Iterator[Check]:
    """Check the build of PyTorch, and each GPU."""
    build = f"{torch.__version__}, " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA")
    if torch.cuda.is_available():
        yield Check("ok", "torch", build)
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            text = f"{device.name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
            fp8 = "" if device.major >= 9 else f"; FP8 needs capability 9.0, this GPU has {device.major}.{device.minor}"
            yield Check("ok", f"GPU {index}", text + fp8)
    elif Path("/dev/nvidiactl").exists():
        advice = (
            "it cannot use the driver; compare `nvidia-smi` with the build's CUDA version"
            if torch.version.cuda
            else "install the build for your CUDA version, as PyTorch's install page shows"
        )
        yield Check("problem", "torch", f"{build}, but this machine has an NVIDIA GPU: {advice}")
    else:
        yield Check("ok", "torch", f"{build}; no NVIDIA GPU")


def _processor_and_memory() -> Check:
    threads = os.environ.get("OMP_NUM_THREADS")
    note = f", OMP_NUM_THREADS={threads}" if threads else ""
    limit = f"at most {rank_limit()} ranks, {RANKS_PER_CORE} per processor and {RANK_BYTES >> 20} MiB each"
    return Check("ok", "machine", f"{cores():g} processors, {memory_bytes() / GIB:.1f} GiB of memory{note}: {limit}")


def _compiler() -> Check:
    """Check the compiler of the CPU kernels by building them."""
    from archon.models.cpu.library import kernels

    if kernels() is not None:
        return Check("ok", "CPU kernels", "compiled")
    return Check(
        "problem",
        "CPU kernels",
        "cannot be compiled, so small models are slower on a CPU: install gcc, or set CC to it",
    )


def _folders() -> Iterator[Check]:
    """Check that runs can be written here, and that caches and shared memory have room."""
    cache = Path(os.environ.get("ARCHON_CACHE") or "~/.cache/archon").expanduser()
    for subject, folder, least in (
        ("this folder", Path.cwd(), MIN_DISK),
        ("temporary folder", Path(tempfile.gettempdir()), MIN_DISK),
        ("cache", cache, MIN_DISK),
        ("shared memory", Path("/dev/shm"), MIN_SHARED_MEMORY + 1),
    ):
        place = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(place).free
        text = f"{folder}, {free / GIB:.1f} GiB free"
        if not os.access(place, os.W_OK):
            yield Check("problem", subject, f"{folder} cannot be written; choose another, or change its permissions")
        elif free < least:
            advice = "docker run --shm-size=8g" if subject == "shared memory" else "remove old runs and checkpoints"
            yield Check("problem", subject, f"{text}, expected at least {least / GIB:.1f}: {advice}")
        else:
            yield Check("ok", subject, text)


def _port(port: int) -> Check:
    """Check that a server can listen on loopback."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            return Check(
                "problem", "port", f"127.0.0.1:{port} cannot be used ({error.strerror}): archon serve --port 0"
            )
    return Check("ok", "port", f"127.0.0.1:{port} is free for archon serve")
