"""Random streams: one seed from what names a stream, the same on every machine."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


def derive_seed(*parts: int) -> int:
    """A 63-bit seed that depends on every part and their order, the same in every process and on every machine."""
    digest = hashlib.blake2b(struct.pack(f"<{len(parts)}q", *parts), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
