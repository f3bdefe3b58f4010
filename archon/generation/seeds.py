"""Seeds of random streams, derived from the numbers that identify a stream."""

from __future__ import annotations

import hashlib
import struct


def derive_seed(*parts: int) -> int:
    """Return a 63-bit seed that depends on every part and their order, and is the same on every machine."""
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def request_seed(seed: int, number: int) -> int:
    """Return a 64-bit seed for the request with this number, if it has no seed."""
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
