"""Delta between two checkpoints: only the changed elements. In bfloat16 an RL step changes few of them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

DELTA_FILE = "delta.safetensors"
MAX_DELTA_FRACTION = 0.5
"""Maximum size of a delta as a fraction of the checkpoint. Above it, the whole checkpoint is sent."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def write_delta(old: Path, new: Path, folder: Path) -> bool:
    """Write index and value of every element of checkpoint `new` that differs from `old` in any bit to `folder`.

    Returns:
        False, without a file, if checkpoint `old` does not exist, names, shapes or dtypes differ, or the delta exceeds
        `MAX_DELTA_FRACTION` of `new`.
    """
    before, after = _files(old), _files(new)
    if not before or before.keys() != after.keys():
        return False
    parts: dict[str, Tensor] = {}
    size, limit = 0, MAX_DELTA_FRACTION * sum(path.stat().st_size for path in new.glob("*.safetensors"))
    for name, path in after.items():
        a, b = _read(before[name], name), _read(path, name)
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        bits = _BITS[b.dtype.itemsize]
        changed = (a.view(bits) != b.view(bits)).flatten().nonzero().flatten()
        parts[f"{name}.indices"] = changed.to(torch.int32 if b.numel() < 2**31 else torch.int64)
        parts[f"{name}.values"] = b.flatten()[changed]
        size += sum(parts[f"{name}.{kind}"].nbytes for kind in ("indices", "values"))
        if size > limit:
            return False
    folder.mkdir()
    save_file(parts, folder / DELTA_FILE)
    return True


def _files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            files |= dict.fromkeys(file.keys(), path)
    return files


def _read(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor
