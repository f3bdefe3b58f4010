"""Read and write weights for megatron-core's GPTModel, one folder with one safetensors file per rank.

    path/mp_rank_TT[_PPP][_EEE]/model.safetensors  the state dict of the rank's GPTModel
         megatron.json                             layout, model arguments, size and SHA-256 of the files
         config.json, tokenizer.json, …            Hugging Face config and tokenizer, needed to convert back

The folders are named as in Megatron-LM: PPP is present with pipeline parallelism, EEE with expert parallelism.
Megatron-LM writes pickles, which can run arbitrary code when they are read. These files are safetensors; Megatron loads
them with `model.load_state_dict(safetensors.torch.load_file(file), strict=False)`.

The layout is detected from folders and keys, so that the files may also be written in Megatron. The optional manifest
verifies them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import archon
from archon.checkpoint.atomic import write_json
from archon.checkpoint.formats.megatron.gpt_config import megatron_arguments
from archon.checkpoint.formats.megatron.sharding import (
    EMBEDDING,
    FusedTensor,
    MegatronLayout,
    RankCoordinates,
    RankTensors,
    TensorSlice,
    fused_shape,
)
from archon.checkpoint.hf_reader import WEIGHT_DTYPES
from archon.checkpoint.safetensors_file import (
    LazyTensor,
    Region,
    SafetensorsFile,
    fail,
    full_region,
    region_shape,
    write_safetensors,
)
from archon.checkpoint.state_file import check_files
from archon.checkpoint.tensor_reader import read_region
from archon.models.hf.state_dict import BaseStateDictAdapter
from archon.schema.errors import CheckpointError

RANK_FILE = "model.safetensors"
MANIFEST_FILE = "megatron.json"
FORMAT = 1
_FOLDER = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3,4}))?(?:_(\d{3,4}))?")


def rank_folder(layout: MegatronLayout, rank: RankCoordinates) -> str:
    """Return Megatron-LM's name of a rank's folder."""
    stage = f"_{rank.pp:03d}" if layout.pp > 1 else ""
    experts = f"_{rank.ep:03d}" if layout.ep > 1 else ""
    return f"mp_rank_{rank.tp:02d}{stage}{experts}"


def is_megatron_folder(path: Path) -> bool:
    """Return whether `path` holds rank folders."""
    return any(_FOLDER.fullmatch(entry.name) for entry in path.iterdir())


def rank_state(
    rank_tensors: RankTensors, rank: RankCoordinates, tensors: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    """Return the state dict of a rank; its lazy tensors are read from `tensors` (by Hugging Face key).

    Raises:
        CheckpointError: tensors to be fused differ in dtype.
    """
    return {name: _fuse_slices(name, slices, tensors) for name, slices in rank_tensors.tensors(rank).items()}


def _fuse_slices(name: str, slices: FusedTensor, tensors: Mapping[str, LazyTensor]) -> LazyTensor:
    dtypes = {tensors[part.key].dtype: part.key for part in slices}
    if len(dtypes) > 1:
        kinds = ", ".join(f"{key!r} is {dtype}" for dtype, key in dtypes.items())
        raise CheckpointError(f"{name!r} is one tensor in megatron-core, but {kinds}; convert them to one dtype")
    (dtype,) = dtypes

    def read(part: TensorSlice) -> Tensor:
        if part.padding:
            return torch.zeros(region_shape(part.region), dtype=dtype)
        return tensors[part.key].read(part.region)

    def load(region: Region) -> Tensor:
        return (read(slices[0]) if len(slices) == 1 else torch.cat([read(part) for part in slices]))[region]

    return LazyTensor(dtype, fused_shape(slices), load)


def write_ranks(folder: Path, rank_tensors: RankTensors, tensors: Mapping[str, LazyTensor]) -> None:
    """Write all ranks' files and the manifest to an empty folder, one tensor in memory at a time."""
    layout, files = rank_tensors.layout, {}
    config, model = megatron_arguments(rank_tensors.args, layout)
    for rank in layout.ranks():
        name = f"{rank_folder(layout, rank)}/{RANK_FILE}"
        (folder / name).parent.mkdir()
        digest = write_safetensors(folder / name, rank_state(rank_tensors, rank, tensors), "export.tensor")
        files[name] = {"bytes": (folder / name).stat().st_size, "sha256": digest}
    manifest = {"format": FORMAT, "archon": archon.__version__, "layout": asdict(layout)}
    write_json(folder / MANIFEST_FILE, manifest | {"transformer_config": config, "gpt_model": model, "files": files})


@dataclass(frozen=True)
class _StoredPart:
    """A region of a Hugging Face tensor, stored as `rows` of the entry `name` in a rank's file."""

    region: Region
    file: SafetensorsFile
    name: str
    rows: slice

    def read(self) -> Tensor:
        entry = self.file.entries[self.name]
        return read_region(self.file, entry, (self.rows, *full_region(entry.shape[1:])))


@contextmanager
def open_ranks(
    path: Path, adapter: BaseStateDictAdapter, *, drop_padding: bool = False
) -> Iterator[tuple[MegatronLayout, dict[str, LazyTensor]]]:
    """Yield a folder's layout and its lazy tensors by Hugging Face key, readable within the block.

    Args:
        path: the folder of the rank folders.
        adapter: adapter of the stored model.
        drop_padding: drop the rows beyond the vocabulary even if training in Megatron has made them nonzero.

    Raises:
        CheckpointError: keys, shapes or dtypes of a rank differ from the model's, a file differs from the manifest, or
            the padding is nonzero without `drop_padding`.
    """
    with ExitStack() as stack:
        files = {name: stack.enter_context(SafetensorsFile(path / name / RANK_FILE)) for name in _rank_names(path)}
        _check_manifest(path, [f"{name}/{RANK_FILE}" for name in files])
        layout = _detect_layout(path, files, adapter.args.vocab_size)
        rank_tensors = RankTensors(adapter, layout)
        stored_parts: dict[str, list[_StoredPart]] = {key: [] for key in rank_tensors.shapes}
        for rank in layout.ranks():
            file = files[rank_folder(layout, rank)]
            tensors = rank_tensors.tensors(rank)
            _check_tensors(file, tensors)
            for name, slices in tensors.items():
                row = 0
                for part in slices:
                    stored = _StoredPart(part.region, file, name, slice(row, row + part.rows))
                    row += part.rows
                    if not part.padding:
                        stored_parts[part.key].append(stored)
                    elif not drop_padding and bool(stored.read().any()):
                        fail(
                            file.path,
                            f"key {name!r} has nonzero values in the padding beyond the vocabulary of "
                            f"{adapter.args.vocab_size}, which a Hugging Face checkpoint cannot hold; "
                            "set drop_padding (--drop-padding) to drop them",
                        )
        yield (
            layout,
            {key: _assemble_tensor(key, rank_tensors.shapes[key], parts) for key, parts in stored_parts.items()},
        )


def _assemble_tensor(key: str, shape: tuple[int, ...], stored_parts: list[_StoredPart]) -> LazyTensor:
    """Return a Hugging Face tensor, assembled from the ranks' files on read; unequal replicas raise CheckpointError."""
    dtype = stored_parts[0].file.entries[stored_parts[0].name].dtype
    for stored in stored_parts:
        entry = stored.file.entries[stored.name]
        if entry.dtype != dtype:
            first = stored_parts[0].file.path
            fail(stored.file.path, f"key {stored.name!r} is {entry.dtype}, but {dtype} in {first}; expected one dtype")

    def load(region: Region) -> Tensor:
        out = torch.empty(shape, dtype=dtype)
        seen: dict[str, _StoredPart] = {}
        for stored in stored_parts:
            part = stored.read()
            first = seen.setdefault(str(stored.region), stored)
            if first is stored:
                out[stored.region] = part
            elif not torch.equal(part.view(torch.uint8), out[stored.region].contiguous().view(torch.uint8)):
                fail(
                    stored.file.path,
                    f"key {stored.name!r} differs from {first.name!r} in {first.file.path}; expected them to be equal, "
                    f"since both hold {key!r}",
                )
        return out[region]

    return LazyTensor(dtype, shape, load)


def _rank_names(path: Path) -> list[str]:
    names = sorted(entry.name for entry in path.iterdir() if _FOLDER.fullmatch(entry.name))
    if not names:
        fail(path, "no mp_rank_* directory; expected for example mp_rank_00")
    for name in names:
        if not (path / name / RANK_FILE).is_file():
            pickled = [file.name for file in (path / name).iterdir() if file.suffix == ".pt"]
            if pickled:
                fail(
                    path / name / pickled[0],
                    "it is pickled; unpickling can run arbitrary code, so archon reads only safetensors: write the "
                    f"rank's state dict to {RANK_FILE} next to it, by safetensors.torch.save_file",
                )
            fail(path / name, f"it holds no {RANK_FILE}")
    return names


def _detect_layout(path: Path, files: Mapping[str, SafetensorsFile], vocab_size: int) -> MegatronLayout:
    """Detect the layout from folder names and keys; raise CheckpointError if a rank is missing."""
    numbers = []
    for name in files:
        match = _FOLDER.fullmatch(name)
        assert match is not None
        numbers.append(tuple(int(number) for number in match.groups() if number is not None))
    if len({len(number) for number in numbers}) > 1:
        fail(path, f"its folders belong to several layouts: {', '.join(files)}; keep one layout")
    counts = [max(column) + 1 for column in zip(*numbers, strict=True)]
    first = next(iter(files.values()))
    if len(counts) == 2:
        # The second number is a pipeline stage, or an expert-parallel rank if every rank has the embedding.
        is_pipeline = any(EMBEDDING not in file.entries for file in files.values())
        counts = [counts[0], counts[1], 1] if is_pipeline else [counts[0], 1, counts[1]]
    tp, pp, ep = (*counts, 1, 1)[:3]
    if EMBEDDING not in first.entries:
        fail(first.path, f"key {EMBEDDING!r} is missing, which the first stage of megatron-core's GPTModel has")
    keys = [key for file in files.values() for key in file.entries]
    layout = MegatronLayout(
        tp,
        pp,
        ep,
        spec="te" if any(key.endswith("linear_qkv.layer_norm_weight") for key in keys) else "local",
        experts="grouped" if any(key.endswith("mlp.experts.linear_fc1.weight0") for key in keys) else "sequential",
        vocab_rows=tp * first.entries[EMBEDDING].shape[0],
    )
    for rank in layout.ranks():
        if rank_folder(layout, rank) not in files:
            fail(path, f"{rank_folder(layout, rank)} is missing among the ranks of tp {tp}, pp {pp}, ep {ep}")
    if layout.vocab_rows < vocab_size:
        fail(
            first.path,
            f"key {EMBEDDING!r} has {layout.vocab_rows} rows over all ranks, fewer than the vocabulary of {vocab_size}",
        )
    return layout


def _check_tensors(file: SafetensorsFile, tensors: Mapping[str, FusedTensor]) -> None:
    """Raise CheckpointError unless the file holds exactly `tensors`; Transformer Engine's `_extra_state` is ignored."""
    for name in file.entries:
        if name not in tensors and not name.endswith("._extra_state"):
            fail(
                file.path,
                f"unknown key {name!r}: a rank of this model has no such tensor; is the config of another model?",
            )
    for name, slices in tensors.items():
        if name not in file.entries:
            fail(file.path, f"key {name!r} is missing")
        entry = file.entries[name]
        if entry.shape != fused_shape(slices):
            fail(file.path, f"key {name!r} has shape {list(entry.shape)}, expected {list(fused_shape(slices))}")
        if entry.dtype not in WEIGHT_DTYPES:
            fail(file.path, f"key {name!r} is {entry.dtype}; weights must be float64, float32, float16 or bfloat16")


def _check_manifest(path: Path, files: list[str]) -> None:
    manifest = path / MANIFEST_FILE
    if not manifest.is_file():
        return
    try:
        listed = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        listed = {name: {"bytes": entry["bytes"], "sha256": entry["sha256"]} for name, entry in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        fail(manifest, "it is damaged; remove it to read the files without verifying their checksums")
    for name in files:
        if name not in listed:
            fail(path / name, f"{MANIFEST_FILE} does not list it; remove one of the two")
    check_files(path, listed, MANIFEST_FILE)
