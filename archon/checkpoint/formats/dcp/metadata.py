"""Reader of a DCP folder's `.metadata`: tensors, their chunks and storage locations.

The file is a pickled `torch.distributed.checkpoint.metadata.Metadata`. `pickle.load` can run any code, so it is parsed
as plain data here, and every field is checked before use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from archon.checkpoint.formats.dcp.plain_pickle import GlobalName, PickledDict, Record, read_pickle
from archon.checkpoint.safetensors_file import fail, overlap

METADATA_FILE = ".metadata"
# The metadata of 70 billion parameters on 512 ranks takes 150 MB.
MAX_METADATA_BYTES = 2**29
MAX_CHUNKS = 2**16
MAX_DIMENSIONS = 8
_METADATA = "torch.distributed.checkpoint.metadata."
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_ALLOWED = frozenset(
    {
        *(
            f"{_METADATA}{name}"
            for name in (
                "Metadata",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "TensorProperties",
                "MetadataIndex",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.Size",
        "torch.serialization._get_layout",
        # The path of the folder when it was saved; its module depends on the version of Python.
        *(f"{module}.{kind}Path" for module in ("pathlib", "pathlib._local") for kind in ("", "Posix", "Windows")),
        *_DTYPES,
    }
)
_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Chunk:
    """A region of a tensor: a `torch.save` archive in bytes [start, start + length) of a file of the folder.

    Attributes:
        file: name of the file.
        start: first byte of the archive.
        length: bytes of the archive.
        offsets: start of the region in the tensor, per dimension.
        sizes: shape of the region.
    """

    file: str
    start: int
    length: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the folder; its chunks cover it without overlap."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def read_metadata(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a DCP folder by name; other values are skipped.

    Raises:
        CheckpointError: `.metadata` is missing, too large, damaged or contradictory, names a class that PyTorch does
            not write there, or places data outside the folder.
    """
    file = folder / METADATA_FILE
    if not file.is_file():
        fail(file, "it is missing; a folder of torch.distributed.checkpoint has one")
    if file.stat().st_size > MAX_METADATA_BYTES:
        fail(file, f"it has {file.stat().st_size} bytes; archon reads up to {MAX_METADATA_BYTES}")
    return _Parser(file).tensors(read_pickle(file.read_bytes(), _ALLOWED, file))


class _Parser:
    """Validating parser of the plain data of a `.metadata` file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def tensors(self, metadata: Any) -> dict[str, StoredTensor]:
        fields = self.fields(metadata, f"{_METADATA}Metadata")
        places = self.places(fields.get("storage_data"))
        tensors: dict[str, StoredTensor] = {}
        for name, entry in self.items(fields.get("state_dict_metadata"), "state_dict_metadata"):
            if not isinstance(name, str) or name in tensors:
                fail(self.file, "state_dict_metadata has a repeated name or one that is no string")
            if not isinstance(entry, Record):
                fail(self.file, f"the entry of {name!r} does not describe a tensor")
            if entry.name != f"{_METADATA}BytesStorageMetadata":
                tensors[name] = self.tensor(name, entry, places)
        return tensors

    def tensor(self, name: str, entry: Record, places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]) -> Any:
        fields = self.fields(entry, f"{_METADATA}TensorStorageMetadata")
        dtype = self.dtype(name, fields.get("properties"))
        shape = self.sizes(fields.get("size"), name)
        listed = self.expect(fields.get("chunks"), list, f"the chunks of {name!r}")
        if len(listed) > MAX_CHUNKS:
            fail(self.file, f"tensor {name!r} has {len(listed)} chunks; archon reads up to {MAX_CHUNKS}")
        chunks = []
        for item in listed:
            chunk_fields = self.fields(item, f"{_METADATA}ChunkStorageMetadata")
            offsets, sizes = (self.sizes(chunk_fields.get(key), name) for key in ("offsets", "sizes"))
            if len(offsets) != len(shape) or len(sizes) != len(shape):
                fail(self.file, f"a chunk of {name!r} has other dimensions than its shape {list(shape)}")
            if any(a + n > limit for a, n, limit in zip(offsets, sizes, shape, strict=True)):
                fail(self.file, f"a chunk of {name!r} at {list(offsets)} exceeds its shape {list(shape)}")
            if not math.prod(sizes):
                continue  # a rank without a part of the tensor
            if (name, offsets) not in places:
                fail(self.file, f"the chunk of {name!r} at {list(offsets)} is stored nowhere")
            file, start, length = places[name, offsets]
            if length < math.prod(sizes) * dtype.itemsize:
                fail(
                    self.file,
                    f"the chunk of {name!r} at {list(offsets)} has {length} bytes, too few for {list(sizes)} {dtype}",
                )
            chunks.append(Chunk(file, start, length, offsets, sizes))
        self.check_cover(name, shape, chunks)
        return StoredTensor(dtype, shape, tuple(chunks))

    def check_cover(self, name: str, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
        """Raise CheckpointError unless the chunks cover the tensor and no two overlap."""
        count = sum(math.prod(chunk.sizes) for chunk in chunks)
        if count != math.prod(shape):
            fail(self.file, f"the chunks of {name!r} hold {count} elements, its shape {list(shape)} {math.prod(shape)}")
        if len(chunks) < 2:
            return
        # Sorted along the dimension that is cut most often, only neighbors can overlap.
        dim = max(range(len(shape)), key=lambda d: len({chunk.offsets[d] for chunk in chunks}))
        chunks.sort(key=lambda chunk: chunk.offsets[dim])
        for i, chunk in enumerate(chunks):
            region = tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))
            for other in chunks[i + 1 :]:
                if other.offsets[dim] >= chunk.offsets[dim] + chunk.sizes[dim]:
                    break
                if overlap(region, other.offsets, other.sizes):
                    fail(self.file, f"chunks of {name!r} at {list(chunk.offsets)} and {list(other.offsets)} overlap")

    def places(self, storage: Any) -> dict[tuple[str, tuple[int, ...]], tuple[str, int, int]]:
        """Return (file, start, length) of each chunk by tensor name and offsets."""
        places = {}
        for index, info in self.items(storage, "storage_data"):
            key = self.fields(index, f"{_METADATA}MetadataIndex")
            name = self.expect(key.get("fqn"), str, "a name in storage_data")
            if key.get("offset") is None:
                continue  # not a tensor
            place = self.fields(info, "torch.distributed.checkpoint.filesystem._StorageInfo")
            file = self.expect(place.get("relative_path"), str, f"the file of {name!r}")
            if not file or file in (".", "..") or "/" in file or "\\" in file or "\0" in file:
                fail(self.file, f"it places {name!r} in {file!r}; expected the name of a file in the folder")
            if place.get("transform_descriptors") is not None:
                fail(self.file, f"{name!r} is compressed or otherwise transformed; save it again without extensions")
            start, length = (self.count(place.get(field), name) for field in ("offset", "length"))
            places[name, self.sizes(key["offset"], name)] = (file, start, length)
        return places

    def fields(self, record: Any, name: str) -> dict[str, Any]:
        """Return the fields of a pickled dataclass instance of class `name`."""
        if not isinstance(record, Record) or record.name != name:
            actual = record.name if isinstance(record, Record) else type(record).__name__
            fail(self.file, f"it has {actual} where {name} was expected")
        values = {}
        for key, value in self.items(record.state, name) if record.state is not None else ():
            values[self.expect(key, str, f"a field of {name}")] = value
        return values

    def items(self, value: Any, label: str) -> list[tuple[Any, Any]]:
        return self.expect(value, PickledDict, label).items

    def expect(self, value: Any, kind: type[_Kind], label: str) -> _Kind:
        if not isinstance(value, kind):
            fail(self.file, f"{label} is a {type(value).__name__}, expected a {kind.__name__}")
        return value

    def count(self, value: Any, name: str) -> int:
        if type(value) is not int or not 0 <= value < 2**63:
            fail(self.file, f"a size or offset of {name!r} is not a valid count")
        return value

    def sizes(self, value: Any, name: str) -> tuple[int, ...]:
        """Return the numbers of a `torch.Size`, pickled as a call with a tuple."""
        match value:
            case Record(name="torch.Size", args=(tuple(numbers),)) if len(numbers) <= MAX_DIMENSIONS:
                return tuple(self.count(number, name) for number in numbers)
        return fail(
            self.file, f"a shape or an offset of {name!r} is not a torch.Size of at most {MAX_DIMENSIONS} sizes"
        )

    def dtype(self, name: str, properties: Any) -> torch.dtype:
        """Return the dtype of a tensor's properties: the first item of the pickled state."""
        match properties:
            case Record(name=kind, state=(GlobalName(name=dtype), *_)) if kind == f"{_METADATA}TensorProperties":
                if dtype in _DTYPES:
                    return _DTYPES[dtype]
        return fail(self.file, f"the properties of {name!r} have no dtype")
