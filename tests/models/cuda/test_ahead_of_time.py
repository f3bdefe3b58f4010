"""Kernels that the interpreter runs may still be refused by the compiler, or not fit a GPU."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from triton.runtime.jit import KernelInterface

from archon.models import cuda

SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
"""Shared memory of one program by compute capability: A100, RTX 4090, H100, B200 (CUDA C Programming Guide)."""


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_kernel_compiles_and_fits(capability: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.models.cuda.ahead_of_time", str(capability)],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout.splitlines()[-1])
    assert all(max(sizes) <= SHARED_BYTES[capability] for sizes in compiled.values())
    launched = set[str]()
    for path in Path(cuda.__file__).parent.glob("[a-z]*.py"):
        module = importlib.import_module(f"{cuda.__name__}.{path.stem}")
        names = re.findall(r"\b(\w+)\[.+\]\(", path.read_text())
        launched |= {name for name in names if isinstance(getattr(module, name, None), KernelInterface)}
    assert set(compiled) == launched, "ahead_of_time lists other kernels than the modules launch"
