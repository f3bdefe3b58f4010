"""Tensor files of a training state: each rank writes its shards, and any rank reads any region of any tensor.

    tensors.safetensors          one process: every tensor in full
    tensors-00002.safetensors    several processes: the shards that rank 2 wrote
    index.json                   several processes: shape and dtype of each tensor and the file of each of its regions,
                                 {name: {"dtype", "shape", "boxes": [{"file", "start", "shape"}]}}

One rank writes each replicated region (data-parallel replicas, parameters without tensor sharding); the writers are
spread evenly. The regions of a tensor do not overlap and cover it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from archon.checkpoint.safetensors_file import (
    DTYPE_NAMES,
    DTYPES,
    LazyTensor,
    Region,
    SafetensorsFile,
    fail,
    overlap,
    region_shape,
    write_safetensors,
)
from archon.checkpoint.state_tree import Shard
from archon.checkpoint.tensor_reader import lazy_tensor, read_region
from archon.parallel.control_plane import ControlPlane
from archon.schema.errors import CheckpointError, describe_error

TENSORS_FILE = "tensors.safetensors"
INDEX_FILE = "index.json"


def assign_shards(shards: Mapping[str, Shard], plane: ControlPlane) -> dict[str, Shard]:
    """Return the subset of this rank's shards that it writes: each region has exactly one writer. A collective."""
    if plane.size == 1:
        return dict(shards)
    held = {_shard_id(name, shard): name for name, shard in shards.items() if shard.data.numel() or 0 in shard.shape}
    ids = torch.tensor(sorted(held), dtype=torch.int64)
    counts = plane.all_gather_tensor(torch.tensor([len(ids)])).flatten().tolist()
    padded = torch.full((max(*counts, 1),), torch.iinfo(torch.int64).max)
    padded[: len(ids)] = ids
    ids_by_rank = plane.all_gather_tensor(padded)
    places = torch.searchsorted(ids_by_rank, ids.expand(plane.size, -1).contiguous())
    holds = ids_by_rank.gather(1, places.clamp(max=padded.numel() - 1)) == ids
    lower_holders, holders = holds[: plane.rank].sum(0), holds.sum(0)
    is_writer = ids.remainder(holders) == lower_holders
    names = {held[shard_id] for shard_id in ids[is_writer].tolist()}
    return {name: shard for name, shard in shards.items() if name in names}


def _shard_id(name: str, shard: Shard) -> int:
    text = f"{name} {shard.shape} {[(part.start, part.stop) for part in shard.region]}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def write_shards(folder: Path, shards: Mapping[str, Shard], plane: ControlPlane) -> dict[str, Any]:
    """Write this rank's file; of several ranks, one without shards writes none.

    Returns:
        The file's name, its SHA-256 and its regions by tensor name, as `build_index` expects them.
    """
    name = TENSORS_FILE if plane.size == 1 else f"tensors-{plane.rank:05d}.safetensors"
    if not shards and plane.size > 1:
        return {"file": None}
    digest = write_safetensors(folder / name, {key: shard.data for key, shard in shards.items()}, "save.tensor")
    regions = {
        key: [DTYPE_NAMES[shard.data.dtype], shard.shape, [s.start for s in shard.region], region_shape(shard.region)]
        for key, shard in shards.items()
    }
    return {"file": name, "sha256": digest, "boxes": regions}


def build_index(written: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the index of all ranks' files from the results of `write_shards`.

    Raises:
        CheckpointError: ranks disagree about a tensor's shape or dtype, or its regions do not cover it.
    """
    index: dict[str, Any] = {}
    for entry in written:
        for name, (dtype, shape, start, size) in entry.get("boxes", {}).items():
            known = index.setdefault(name, {"dtype": dtype, "shape": shape, "boxes": []})
            if [known["dtype"], known["shape"]] != [dtype, shape]:
                raise CheckpointError(
                    f"tensor {name} is {known['dtype']} {known['shape']} on one rank and {dtype} {shape} on another; "
                    "every rank must build the same model"
                )
            known["boxes"].append({"file": entry["file"], "start": start, "shape": size})
    for name, known in index.items():
        count, expected = sum(math.prod(region["shape"]) for region in known["boxes"]), math.prod(known["shape"])
        if count != expected:
            raise CheckpointError(
                f"the ranks wrote {count} elements of tensor {name}, expected {expected}; a rank did not save its shard"
            )
    return index


@contextmanager
def open_tensors(folder: Path, names: set[str]) -> Iterator[dict[str, LazyTensor]]:
    """Yield the tensors of a checkpoint folder by name, readable within the block; only files in `names` are opened."""
    with ExitStack() as opened:

        @functools.cache
        def open_file(name: str) -> SafetensorsFile:
            if name not in names:
                fail(folder / INDEX_FILE, f"it names the file {name!r}, which the checkpoint's manifest does not list")
            return opened.enter_context(SafetensorsFile(folder / name))

        def load(name: str, dtype: torch.dtype, stored: list[dict[str, Any]], region: Region) -> Tensor:
            """Return a region of a tensor, reading only the stored regions that overlap it."""
            out = torch.empty(region_shape(region), dtype=dtype)
            filled = 0
            for box in stored:
                regions = overlap(region, box["start"], box["shape"])
                if regions is None:
                    continue
                source, target = regions
                file = open_file(box["file"])
                entry = file.entries.get(name)
                if entry is None or (entry.dtype, entry.shape) != (dtype, tuple(box["shape"])):
                    fail(file.path, f"key {name!r} is not {dtype} {box['shape']}, as {INDEX_FILE} says")
                filled += read_region(file, entry, source, out[target]).numel()
            if filled != out.numel():
                fail(folder / INDEX_FILE, f"the regions it lists for tensor {name!r} do not cover it")
            return out

        tensors = {}
        if INDEX_FILE in names:
            try:
                for name, item in json.loads((folder / INDEX_FILE).read_text(encoding="utf-8")).items():
                    dtype = DTYPES[item["dtype"]]
                    read = functools.partial(load, name, dtype, item["boxes"])
                    tensors[name] = LazyTensor(dtype, tuple(item["shape"]), read)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                reason = describe_error(error)
                fail(folder / INDEX_FILE, f"it is not an index of tensors ({reason}); copy the folder again")
        else:
            file = open_file(TENSORS_FILE)
            tensors = {name: lazy_tensor(file, entry) for name, entry in file.entries.items()}
        yield tensors


def check_files(
    folder: Path, files: Mapping[str, Mapping[str, Any]], manifest: str, rank: int = 0, ranks: int = 1
) -> None:
    """Raise CheckpointError unless `folder` holds `files` with the sizes and SHA-256s that `manifest` lists.

    The checksums are divided among `ranks`.
    """
    for name, entry in files.items():
        file = folder / name
        if not file.is_file():
            fail(file, f"it is missing, though {manifest} lists it; copy the folder again")
        if file.stat().st_size != entry["bytes"]:
            fail(file, f"{file.stat().st_size} bytes, but {manifest} says {entry['bytes']}; truncated?")
    for name in sorted(files)[rank::ranks]:
        with (folder / name).open("rb", buffering=0) as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if digest != files[name]["sha256"]:
            fail(folder / name, f"it was altered: its SHA-256 is not the one in {manifest}")
