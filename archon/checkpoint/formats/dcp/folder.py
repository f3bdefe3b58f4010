"""Read and write folders of torch.distributed.checkpoint (DCP).

    path/__0_0.distcp, …  concatenated `torch.save` archives of tensors
         .metadata        pickled names, shapes, chunks and locations of the tensors
         dcp.json         only in folders that archon wrote: the naming scheme of the tensors
         config.json, …   only in folders that archon wrote: config and tokenizer for the way back

Reading assembles the shards of any number of ranks. Nothing is unpickled.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta

from archon.checkpoint.formats.dcp.metadata import METADATA_FILE, StoredTensor, read_metadata
from archon.checkpoint.formats.dcp.torch_file import read_chunk
from archon.checkpoint.safetensors_file import LazyTensor, Region, RegularFile, fail, overlap, region_shape


def is_dcp_folder(path: Path) -> bool:
    """Return whether `path` is a DCP folder."""
    return (path / METADATA_FILE).is_file()


@contextmanager
def open_dcp(folder: Path) -> Iterator[dict[str, LazyTensor]]:
    """Yield the tensors of a folder by name; their regions can be read within the block.

    Raises:
        CheckpointError: the metadata is invalid (see `read_metadata`), or a file is missing or too short.
    """
    stored = read_metadata(folder)
    with ExitStack() as stack:
        files: dict[str, RegularFile] = {}
        for name, tensor in stored.items():
            for chunk in tensor.chunks:
                if chunk.file not in files:
                    files[chunk.file] = stack.enter_context(RegularFile(folder / chunk.file))
                if chunk.start + chunk.length > files[chunk.file].size:
                    fail(
                        files[chunk.file].path,
                        f"it has {files[chunk.file].size} bytes, but {METADATA_FILE} places {name!r} up to byte "
                        f"{chunk.start + chunk.length}; truncated?",
                    )
        yield {
            name: LazyTensor(tensor.dtype, tensor.shape, functools.partial(_load, files, tensor))
            for name, tensor in stored.items()
        }


def _load(files: Mapping[str, RegularFile], tensor: StoredTensor, region: Region) -> Tensor:
    """Return a region of a tensor, reading only the chunks that overlap it."""
    out = torch.empty(region_shape(region), dtype=tensor.dtype)
    for chunk in tensor.chunks:
        regions = overlap(region, chunk.offsets, chunk.sizes)
        if regions is not None:
            source, target = regions
            read_chunk(files[chunk.file], chunk, tensor.dtype, source, out[target])
    return out


class _LazyPlanner(dcp.DefaultSavePlanner):
    """Save planner that reads each tensor when it is written; the planned state holds meta tensors."""

    def __init__(self, tensors: Mapping[str, LazyTensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.tensors[index.fqn].read()


class _Writer(dcp.FileSystemWriter):
    """Writer of one file per tensor, because a file's tensors stay in memory until it is complete; records no path."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=False, sync_files=False)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


def write_dcp(folder: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Write tensors to an existing folder with PyTorch's writer, one in memory at a time; not synced."""
    state = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    dcp.save(state, storage_writer=_Writer(folder), planner=_LazyPlanner(tensors), no_dist=True)
