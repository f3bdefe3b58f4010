"""The tensors of a state on disk: each rank writes the parts it holds, and any rank reads any part of any tensor.

    tensors.safetensors          one process: every tensor whole
    tensors-00002.safetensors    several: what rank 2 wrote
    index.json                   several: shape and dtype of each tensor, and where its boxes lie:
                                 {name: {"dtype", "shape", "boxes": [{"file", "start", "shape"}]}}

A part that several ranks hold (replicas, what tensor parallelism leaves whole) is written by one of them; which one is
spread evenly. Boxes do not overlap and together are the whole.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from archon.checkpoint.safetensors_file import (
    DTYPE_NAMES,
    DTYPES,
    PIECE_BYTES,
    SafetensorsFile,
    TensorEntry,
    bytes_of,
    refuse,
    write_safetensors,
)
from archon.checkpoint.state_tree import Box, Part, box_shape, map_leaves, whole_box
from archon.parallel.control_plane import ControlPlane
from archon.schema.errors import CheckpointError

TENSORS_FILE = "tensors.safetensors"
INDEX_FILE = "index.json"


def file_of(plane: ControlPlane) -> str:
    """The name of what this rank writes."""
    return TENSORS_FILE if plane.size == 1 else f"tensors-{plane.rank:05d}.safetensors"


def own_share(parts: Mapping[str, Part], plane: ControlPlane) -> dict[str, Part]:
    """Of the parts this rank holds those that it is to write: every box of every tensor falls to one rank. A
    collective."""
    if plane.size == 1:
        return dict(parts)
    held = {_box_id(name, part): name for name, part in parts.items() if part.data.numel() or 0 in part.shape}
    ids = torch.tensor(sorted(held), dtype=torch.int64)
    counts = plane.all_gather_tensor(torch.tensor([len(ids)])).flatten().tolist()
    padded = torch.full((max(*counts, 1),), torch.iinfo(torch.int64).max)
    padded[: len(ids)] = ids
    everyone = plane.all_gather_tensor(padded)
    places = torch.searchsorted(everyone, ids.expand(plane.size, -1).contiguous()).clamp(max=padded.numel() - 1)
    holds = everyone.gather(1, places) == ids
    before, holders = holds[: plane.rank].sum(0), holds.sum(0)
    mine = ids.remainder(holders) == before
    names = {held[box_id] for box_id in ids[mine].tolist()}
    return {name: part for name, part in parts.items() if name in names}


def _box_id(name: str, part: Part) -> int:
    text = f"{name} {part.shape} {[(p.start, p.stop) for p in part.box]}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def write_share(folder: Path, share: Mapping[str, Part], plane: ControlPlane) -> dict[str, Any]:
    """Write this rank's file, where it has anything to write, and describe it: file, SHA-256, boxes by name."""
    name = file_of(plane)
    if not share and plane.size > 1:
        return {"file": None}
    digest = write_safetensors(folder / name, {key: part.data for key, part in share.items()}, "save.tensor")
    boxes = {
        key: [DTYPE_NAMES[part.data.dtype], part.shape, [p.start for p in part.box], box_shape(part.box)]
        for key, part in share.items()
    }
    return {"file": name, "sha256": digest, "boxes": boxes}


def build_index(written: list[dict[str, Any]]) -> dict[str, Any]:
    """The index of what the ranks wrote; CheckpointError unless every tensor is there in full."""
    index: dict[str, Any] = {}
    for entry in written:
        for name, (dtype, shape, start, size) in entry.get("boxes", {}).items():
            known = index.setdefault(name, {"dtype": dtype, "shape": shape, "boxes": []})
            if [known["dtype"], known["shape"]] != [dtype, shape]:
                raise CheckpointError(f"ranks differ about {name}: {known['dtype']} {known['shape']}, {dtype} {shape}")
            known["boxes"].append({"file": entry["file"], "start": start, "shape": size})
    for name, known in index.items():
        held = sum(math.prod(box["shape"]) for box in known["boxes"])
        if held != math.prod(known["shape"]):
            raise CheckpointError(f"the ranks hold {held} of the {math.prod(known['shape'])} elements of {name}")
    return index


@dataclass(frozen=True)
class _Box:
    file: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


class StateFiles:
    """The tensors of a checkpoint folder, by name; open until `close`."""

    def __init__(self, folder: Path, names: set[str]) -> None:
        """`names` are the files that the manifest vouches for."""
        self.folder = folder
        self._names = names
        self._open: dict[str, SafetensorsFile] = {}
        self.tensors: dict[str, StoredTensor] = {}
        if INDEX_FILE not in names:
            for name, entry in self.file(TENSORS_FILE).entries.items():
                box = _Box(TENSORS_FILE, (0,) * len(entry.shape), entry.shape)
                self.tensors[name] = StoredTensor(self, name, entry.dtype, entry.shape, (box,))
            return
        for name, item in json.loads((folder / INDEX_FILE).read_text(encoding="utf-8")).items():
            boxes = tuple(_Box(box["file"], tuple(box["start"]), tuple(box["shape"])) for box in item["boxes"])
            self.tensors[name] = StoredTensor(self, name, DTYPES[item["dtype"]], tuple(item["shape"]), boxes)

    def file(self, name: str) -> SafetensorsFile:
        if name not in self._names:
            refuse(self.folder / INDEX_FILE, f"it places a tensor in {name!r}, which is not part of the checkpoint")
        if name not in self._open:
            self._open[name] = SafetensorsFile(self.folder / name)
        return self._open[name]

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of an open checkpoint; `read` reads just the boxes that overlap what is asked for."""

    files: StateFiles
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[_Box, ...]

    def read(self, box: Box | None = None) -> Tensor:
        wanted = whole_box(self.shape) if box is None else box
        out = torch.empty(box_shape(wanted), dtype=self.dtype)
        filled = 0
        for stored in self.boxes:
            bounds = [
                (max(want.start, first), min(want.stop, first + size))
                for want, first, size in zip(wanted, stored.start, stored.shape, strict=True)
            ]
            if any(start >= stop for start, stop in bounds):
                continue
            there = tuple(slice(a - first, b - first) for (a, b), first in zip(bounds, stored.start, strict=True))
            here = tuple(slice(a - w.start, b - w.start) for (a, b), w in zip(bounds, wanted, strict=True))
            part = out[here]
            read_box(self.files.file(stored.file), self._entry(stored), there, part)
            filled += part.numel()
        if filled != out.numel():
            refuse(self.files.folder / INDEX_FILE, f"its boxes of {self.name!r} are not the whole tensor")
        return out

    def _entry(self, box: _Box) -> TensorEntry:
        file = self.files.file(box.file)
        entry = file.entries.get(self.name)
        if entry is None or (entry.dtype, entry.shape) != (self.dtype, box.shape):
            refuse(file.path, f"key {self.name!r} is not {self.dtype} {list(box.shape)}, as {INDEX_FILE} says")
        return entry


def read_whole(state: Any) -> Any:
    """A state with every stored tensor read whole."""
    return map_leaves(state, lambda leaf: leaf.read() if isinstance(leaf, StoredTensor) else leaf)


def read_box(file: SafetensorsFile, entry: TensorEntry, box: Box, out: Tensor) -> None:
    """Fill `out` with a box of a tensor of a file: in place where it lies in one stretch, else whole rows at a time,
    since the neighbours' parts are in the same pages."""
    what = f"key {entry.name!r}"
    if not box or (box[1:] == whole_box(entry.shape[1:]) and out.is_contiguous()):
        row = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        file.read_into(bytes_of(out), entry.start + (box[0].start * row if box else 0), what)
        return
    row = math.prod(entry.shape[1:]) * entry.dtype.itemsize
    step = max(1, PIECE_BYTES // row)
    for start in range(0, out.shape[0], step):
        rows = min(step, out.shape[0] - start)
        piece = torch.empty(rows, *entry.shape[1:], dtype=entry.dtype)
        file.read_into(bytes_of(piece), entry.start + (box[0].start + start) * row, what)
        out[start : start + rows] = piece[(slice(None), *box[1:])]


def file_digest(path: Path) -> str:
    """SHA-256 of a file, read a piece at a time."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
