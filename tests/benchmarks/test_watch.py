"""What a watched process is said to hold."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

from benchmarks.watch import resident

MIB = 2**20
SIZE, OTHER = 64 * MIB, 8 * MIB
"""What is allocated, and what else may come and go meanwhile."""


def test_memory_of_its_own_and_shared_memory_count_and_pages_of_files_do_not(tmp_path: Path) -> None:
    before = resident(os.getpid())
    own = bytearray(os.urandom(1)) * SIZE
    with_own = resident(os.getpid())
    assert abs(with_own - before - SIZE) < OTHER
    path = tmp_path / "file"
    path.write_bytes(own)
    with path.open("rb") as file, mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE])
        assert abs(resident(os.getpid()) - with_own) < OTHER
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(SIZE)
        with mmap.mmap(file.fileno(), SIZE) as shared:
            shared[:: mmap.PAGESIZE] = b"1" * (SIZE // mmap.PAGESIZE)
            assert abs(resident(os.getpid()) - with_own - SIZE) < OTHER
