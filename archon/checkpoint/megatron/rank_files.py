"""Folders of weights for megatron-core's GPTModel, one safetensors file a rank.

    path/mp_rank_TT[_PPP][_EEE]/model.safetensors  the rank's state dict, under the names that its GPTModel has
         megatron.json                             the layout, the model's arguments, size and SHA-256 of the files
         config.json, tokenizer.json, …            of the Hugging Face checkpoint, for the way back

The folders are named as Megatron-LM names them: PPP is there with pipeline parallelism, EEE with expert parallelism.
Megatron-LM's own files there are pickles, which may run any code when they are read, so these are safetensors; in
Megatron they are loaded by `model.load_state_dict(safetensors.torch.load_file(file), strict=False)`.

The layout is read from the folders and the keys alone, so that ranks may also be written by Megatron's side; the
manifest, where there is one, vouches for the bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import archon
from archon.checkpoint.atomic import write_json
from archon.checkpoint.hf_reader import WEIGHT_DTYPES
from archon.checkpoint.megatron.config import megatron_arguments
from archon.checkpoint.megatron.layout import EMBEDDING, Fused, MegatronLayout, Piece, Placement, Rank, fused_shape
from archon.checkpoint.safetensors_file import Deferred, SafetensorsFile, refuse, write_safetensors
from archon.checkpoint.state_file import file_digest, read_box
from archon.checkpoint.state_tree import Box, Stored, box_shape, whole_box
from archon.models.state_dict import BaseStateDictAdapter
from archon.schema.errors import CheckpointError

RANK_FILE = "model.safetensors"
MANIFEST_FILE = "megatron.json"
FORMAT = 1
_FOLDER = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3,4}))?(?:_(\d{3,4}))?")


def rank_folder(layout: MegatronLayout, rank: Rank) -> str:
    """The name that Megatron-LM gives to a rank's folder."""
    stage = f"_{rank.pp:03d}" if layout.pp > 1 else ""
    experts = f"_{rank.ep:03d}" if layout.ep > 1 else ""
    return f"mp_rank_{rank.tp:02d}{stage}{experts}"


def is_megatron_folder(path: Path) -> bool:
    """Whether `path` holds ranks' folders."""
    return any(_FOLDER.fullmatch(entry.name) for entry in path.iterdir())


def rank_state(placement: Placement, rank: Rank, tensors: Mapping[str, Stored]) -> dict[str, Deferred]:
    """A rank's state dict, of Hugging Face tensors by key; each is read and fused when it is made.

    Raises CheckpointError where tensors to be fused differ in dtype.
    """
    return {name: _fused(name, pieces, tensors) for name, pieces in placement.tensors(rank).items()}


def _fused(name: str, pieces: Fused, tensors: Mapping[str, Stored]) -> Deferred:
    dtypes = {tensors[piece.key].dtype: piece.key for piece in pieces}
    if len(dtypes) > 1:
        kinds = ", ".join(f"{key!r} is {dtype}" for dtype, key in dtypes.items())
        raise CheckpointError(f"{name!r} is one tensor in megatron-core, but {kinds}; give them one dtype")
    (dtype,) = dtypes

    def read(piece: Piece) -> Tensor:
        if piece.padding:
            return torch.zeros(box_shape(piece.box), dtype=dtype)
        return tensors[piece.key].read(piece.box)

    def make() -> Tensor:
        return read(pieces[0]) if len(pieces) == 1 else torch.cat([read(piece) for piece in pieces])

    return Deferred(dtype, fused_shape(pieces), make)


def write_ranks(folder: Path, placement: Placement, tensors: Mapping[str, Stored]) -> None:
    """Write every rank's file and the manifest into an empty folder, a tensor in memory at a time."""
    layout, files = placement.layout, {}
    config, model = megatron_arguments(placement.args, layout)
    for rank in layout.ranks():
        name = f"{rank_folder(layout, rank)}/{RANK_FILE}"
        (folder / name).parent.mkdir()
        digest = write_safetensors(folder / name, rank_state(placement, rank, tensors), "export.tensor")
        files[name] = {"bytes": (folder / name).stat().st_size, "sha256": digest}
    manifest = {"format": FORMAT, "archon": archon.__version__, "layout": asdict(layout)}
    write_json(folder / MANIFEST_FILE, manifest | {"transformer_config": config, "gpt_model": model, "files": files})


@dataclass(frozen=True)
class _Place:
    """Where a box of a tensor lies in a rank's file: the `rows` of the entry `name`."""

    box: Box
    file: SafetensorsFile
    name: str
    rows: slice

    def read(self) -> Tensor:
        entry = self.file.entries[self.name]
        part = (self.rows, *whole_box(entry.shape[1:]))
        out = torch.empty(box_shape(part), dtype=entry.dtype)
        read_box(self.file, entry, part, out)
        return out


@dataclass(frozen=True)
class JoinedTensor:
    """A Hugging Face tensor, joined of what the ranks hold when it is read; copies must be bitwise equal."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    places: tuple[_Place, ...]

    def read(self, box: Box | None = None) -> Tensor:
        out = torch.empty(self.shape, dtype=self.dtype)
        seen: dict[str, _Place] = {}
        for place in self.places:
            part = place.read()
            first = seen.setdefault(str(place.box), place)
            if first is place:
                out[place.box] = part
            elif not torch.equal(part.view(torch.uint8), out[place.box].contiguous().view(torch.uint8)):
                refuse(
                    place.file.path,
                    f"key {place.name!r} differs from {first.name!r} in {first.file.path}; both are {self.key!r}",
                )
        return out if box is None else out[box]


@contextmanager
def opened_ranks(
    path: Path, adapter: BaseStateDictAdapter, *, drop_padding: bool = False
) -> Iterator[tuple[MegatronLayout, dict[str, JoinedTensor]]]:
    """The layout of a folder, and its tensors by Hugging Face key, which are read within the block.

    Args:
        adapter: of the model that the folder is said to hold.
        drop_padding: cut the rows beyond the vocabulary even where they are not zero, as Megatron's training leaves
            them.

    Raises CheckpointError naming file and key unless every key of every rank is expected and there, in its shape and in
    one dtype; for bytes that the manifest does not vouch for; and for padding that would be lost.
    """
    with ExitStack() as stack:
        files = {name: stack.enter_context(SafetensorsFile(path / name / RANK_FILE)) for name in _rank_names(path)}
        _check_manifest(path, [f"{name}/{RANK_FILE}" for name in files])
        layout = _layout_of(path, files, adapter.args.vocab_size)
        placement = Placement(adapter, layout)
        places: dict[str, list[_Place]] = {key: [] for key in placement.shapes}
        for rank in layout.ranks():
            file = files[rank_folder(layout, rank)]
            for name, pieces in _expected(file, placement.tensors(rank)):
                row = 0
                for piece in pieces:
                    place = _Place(piece.box, file, name, slice(row, row + piece.rows))
                    row += piece.rows
                    if not piece.padding:
                        places[piece.key].append(place)
                    elif not drop_padding and bool(place.read().any()):
                        refuse(
                            file.path,
                            f"key {name!r} has values in the padding beyond the vocabulary of "
                            f"{adapter.args.vocab_size}, which a Hugging Face checkpoint cannot hold; "
                            "drop_padding (--drop-padding) cuts them",
                        )
        yield layout, {key: _joined(key, placement.shapes[key], found) for key, found in places.items()}


def _joined(key: str, shape: tuple[int, ...], places: list[_Place]) -> JoinedTensor:
    dtype = places[0].file.entries[places[0].name].dtype
    for place in places:
        entry = place.file.entries[place.name]
        if entry.dtype != dtype:
            first = places[0].file.path
            refuse(place.file.path, f"key {place.name!r} is {entry.dtype}, in {first} it is {dtype}")
    return JoinedTensor(key, dtype, shape, tuple(places))


def _rank_names(path: Path) -> list[str]:
    names = sorted(entry.name for entry in path.iterdir() if _FOLDER.fullmatch(entry.name))
    if not names:
        refuse(path, "it holds no mp_rank_* folder, such as mp_rank_00")
    for name in names:
        if not (path / name / RANK_FILE).is_file():
            pickled = [file.name for file in (path / name).iterdir() if file.suffix == ".pt"]
            if pickled:
                refuse(
                    path / name / pickled[0],
                    "it is pickled; reading it could run any code, so archon reads safetensors only: write the rank's "
                    f"state dict by safetensors.torch.save_file to {RANK_FILE} beside it",
                )
            refuse(path / name, f"it holds no {RANK_FILE}")
    return names


def _layout_of(path: Path, files: Mapping[str, SafetensorsFile], vocab_size: int) -> MegatronLayout:
    """What the names of folders and keys say; CheckpointError where a rank is missing."""
    numbers = []
    for name in files:
        match = _FOLDER.fullmatch(name)
        assert match is not None
        numbers.append(tuple(int(number) for number in match.groups() if number is not None))
    if len({len(number) for number in numbers}) > 1:
        refuse(path, f"its folders are of several layouts: {', '.join(files)}")
    counts = [max(column) + 1 for column in zip(*numbers, strict=True)]
    first = next(iter(files.values()))
    if len(counts) == 2:
        # Of two numbers the second is the stage, or the experts' rank: every one of these has the embedding.
        stages = any(EMBEDDING not in file.entries for file in files.values())
        counts = [counts[0], counts[1], 1] if stages else [counts[0], 1, counts[1]]
    tp, pp, ep = (*counts, 1, 1)[:3]
    if EMBEDDING not in first.entries:
        refuse(first.path, f"key {EMBEDDING!r} is missing, which the first stage of megatron-core's GPTModel has")
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
            refuse(path, f"{rank_folder(layout, rank)} is missing among the ranks of tp {tp}, pp {pp}, ep {ep}")
    if layout.vocab_rows < vocab_size:
        refuse(
            first.path,
            f"key {EMBEDDING!r} has {layout.vocab_rows} rows over all ranks, fewer than the vocabulary of {vocab_size}",
        )
    return layout


def _expected(file: SafetensorsFile, tensors: Mapping[str, Fused]) -> Iterable[tuple[str, Fused]]:
    """`tensors`, where they are exactly what the file holds. Transformer Engine's `_extra_state` is no weight."""
    for name in file.entries:
        if name not in tensors and not name.endswith("._extra_state"):
            refuse(
                file.path, f"unknown key {name!r}: a rank of this model has no such tensor; is the config another's?"
            )
    for name, pieces in tensors.items():
        if name not in file.entries:
            refuse(file.path, f"key {name!r} is missing")
        entry = file.entries[name]
        if entry.shape != fused_shape(pieces):
            refuse(file.path, f"key {name!r} has shape {list(entry.shape)}, expected {list(fused_shape(pieces))}")
        if entry.dtype not in WEIGHT_DTYPES:
            refuse(file.path, f"key {name!r} is {entry.dtype}; weights must be float64, float32, float16 or bfloat16")
    return tensors.items()


def _check_manifest(path: Path, files: list[str]) -> None:
    manifest = path / MANIFEST_FILE
    if not manifest.is_file():
        return
    try:
        content: dict[str, Any] = json.loads(manifest.read_text(encoding="utf-8"))
        known = {name: (entry["bytes"], entry["sha256"]) for name, entry in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        refuse(manifest, "it is damaged; remove it to read the ranks without its checksums")
    for name in sorted({*known, *files}):
        if name not in known:
            refuse(path / name, f"{MANIFEST_FILE} does not list it")
        if name not in files:
            refuse(path / name, f"it is missing, though {MANIFEST_FILE} lists it")
        size, digest = known[name]
        if (path / name).stat().st_size != size or file_digest(path / name) != digest:
            refuse(path / name, f"it was altered: size or SHA-256 are not those in {MANIFEST_FILE}")
