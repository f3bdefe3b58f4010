"""Build `kernels.c` with the machine's C compiler on first use, in about a second, and load it.

The library is cached for the user's other processes. Without a compiler or its OpenMP, PyTorch's operations replace it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from archon.schema.children import child_environment
from archon.schema.private_directory import PrivateDirectory

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
DIGEST_BYTES = 32
SECONDS = 120.0
"""Timeout of the compiler."""

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_ARGUMENTS: dict[str, list[Any]] = {
    "decode_attention": [*[_POINTER] * 7, *[_LONG] * 10, _FLOAT, _FLOAT, _INT],
    "tree_attention": [*[_POINTER] * 8, *[_LONG] * 7, _FLOAT, _INT],
    "tree_attention_backward": [*[_POINTER] * 12, *[_LONG] * 6, _FLOAT, _INT],
    "rms_norm": [*[_POINTER] * 3, *[_LONG] * 5, _FLOAT, _FLOAT, _INT],
    "rotate": [*[_POINTER] * 5, *[_LONG] * 6, _INT, _FLOAT, _FLOAT, _INT],
    "rms_norm_backward": [*[_POINTER] * 5, *[_LONG] * 7, _FLOAT, _FLOAT, _INT],
    "swiglu": [*[_POINTER] * 3, *[_LONG] * 4, _INT],
    "swiglu_backward": [*[_POINTER] * 5, *[_LONG] * 5, _INT],
    "draw": [*[_POINTER] * 6, *[_LONG] * 3, _INT],
    "panel_width": [],
    "product": [*[_POINTER] * 4, *[_LONG] * 4, _INT],
    "store_rows": [*[_POINTER] * 3, *[_LONG] * 6],
}
_FALLIBLE = ("decode_attention", "tree_attention", "rms_norm_backward", "store_rows")
_RESULTS: dict[str, Any] = {**dict.fromkeys(_FALLIBLE, _INT), "panel_width": _LONG}


@functools.cache
def kernels() -> dict[str, Callable[..., int]] | None:
    """Return the compiled functions by name, built on first use; None if the build fails."""
    try:
        ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD)  # a second OpenMP would start more threads
        library = ctypes.CDLL(str(_library()))
        functions = {name: getattr(library, name) for name in _ARGUMENTS}
    except (AttributeError, OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        stderr = getattr(error, "stderr", None) or b""
        reason = f"{error} {stderr.decode(errors='replace')}".strip()
        logger.info("training and generation on this CPU go without their compiled kernels: %s", reason)
        return None
    for name, function in functions.items():
        function.argtypes = _ARGUMENTS[name]
        function.restype = _RESULTS.get(name)
    return functions


@functools.cache
def kernel(name: str) -> Callable[..., int]:
    """Return a compiled function; `kernels` must not be None."""
    functions = kernels()
    assert functions is not None
    return functions[name]


def _library() -> Path:
    """Return the path of the library for this source, compiler and processor; build it if it is missing."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, check=True, timeout=SECONDS, env=child_environment()
    ).stdout
    if b"clang" in version:
        raise OSError("clang brings a second OpenMP, and its threads compete with torch's; set CC to a gcc")
    inputs = [
        SOURCE.read_bytes(),
        version,
        shlex.join([*compiler, *FLAGS]).encode(),
        platform.machine().encode(),
        _processor(),
    ]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "archon" / "kernels"
    library = folder / f"{SOURCE.stem}-{hashlib.sha256(b'|'.join(inputs)).hexdigest()[:16]}.so"
    if not _is_complete(library):
        folder.mkdir(parents=True, exist_ok=True)
        with PrivateDirectory("build-", folder) as scratch:
            built = scratch.path / library.name
            command = [*compiler, *FLAGS, "-o", str(built), str(SOURCE), "-lm"]
            subprocess.run(command, capture_output=True, check=True, timeout=SECONDS, env=child_environment())
            with built.open("ab") as file:
                file.write(_digest(built.read_bytes()))  # loaders ignore trailing bytes
                file.flush()
                os.fsync(file.fileno())
            built.replace(library)  # atomic for other processes
    return library


def _is_complete(library: Path) -> bool:
    """Return whether the file ends with the digest of its content.

    Loading a truncated library kills the process.
    """
    content = library.read_bytes() if library.exists() else b""
    return content[-DIGEST_BYTES:] == _digest(content[:-DIGEST_BYTES])


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _processor() -> bytes:
    """Return the instruction sets of this processor; several machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")
