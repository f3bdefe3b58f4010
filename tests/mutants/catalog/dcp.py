"""Mistakes in reading folders of torch.distributed.checkpoint."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DCP = "tests/checkpoint/test_dcp.py"
DCP_RANKS = "tests/distributed/test_dcp.py::test_shards_of_ranks_are_read"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "every chunk of a tensor is put at its beginning",
        "archon/checkpoint/safetensors_file.py",
        "target = tuple(slice(a - part.start, b - part.start) for (a, b), part in zip(bounds, region, strict=True))",
        "target = tuple(slice(0, b - a) for a, b in bounds)",
        (f"{DCP_RANKS}[d2-tied]",),
    ),
    Mutant(
        "a region is read from the first rows of its chunk",
        "archon/checkpoint/safetensors_file.py",
        "source = tuple(slice(a - first, b - first) for (a, b), first in zip(bounds, start, strict=True))",
        "source = tuple(slice(0, b - a) for a, b in bounds)",
        (f"{DCP}::test_any_region_of_any_stored_order_is_read",),
    ),
    Mutant(
        "a tensor that is a view is read from the start of its storage",
        "archon/checkpoint/formats/dcp/torch_file.py",
        "return StorageLocation(dtype, first + offset * dtype.itemsize, tuple(shape), tuple(strides))",
        "return StorageLocation(dtype, first, tuple(shape), tuple(strides))",
        (f"{DCP}::test_a_view_into_a_larger_storage_is_read",),
    ),
    Mutant(
        "dimensions stored in another order are put back the other way round",
        "archon/checkpoint/formats/dcp/torch_file.py",
        "out.copy_(data.permute([order.index(dim) for dim in range(len(order))]))",
        "out.copy_(data.permute(order))",
        (f"{DCP}::test_any_region_of_any_stored_order_is_read",),
    ),
    Mutant(
        "chunks that overlap are read one over the other",
        "archon/checkpoint/formats/dcp/metadata.py",
        "                if overlap(region, other.offsets, other.sizes):\n",
        "                if chunk.offsets == other.offsets:\n",
        (f"{DCP}::test_damage_is_told",),
    ),
    Mutant(
        "a pickle may name os.system",
        "archon/checkpoint/formats/dcp/plain_pickle.py",
        "if name not in self.allowed:",
        'if name not in (*self.allowed, "os.system", "posix.system"):',
        ("tests/checkpoint/test_plain_pickle.py::test_a_call_of_anything_else_is_refused",),
    ),
)
