"""Hugging Face checkpoints, read tensor by tensor into a model that is already in memory.

Everything is checked before the first weight is touched: the headers of all shards, the index against them, and every
key and parameter, each used exactly once. Then pieces of a few megabytes are read straight into the parameters' own
memory, or through one small buffer a thread where dtype, layout or device differ.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor, nn

from archon.checkpoint.prefault import prefault
from archon.checkpoint.safetensors_file import PIECE_BYTES, SafetensorsFile, TensorEntry, bytes_of, pieces, refuse
from archon.models.state_dict import BaseStateDictAdapter, NativeTarget
from archon.parallel.fsdp import local_tensor, own_part
from archon.schema.errors import CheckpointError
from archon.schema.exhausted import what_ran_out

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Reading releases the GIL and copies from the page cache as fast as one core can; a second thread hides page faults.
READERS = 2
# What a weight may be stored in; integers and 8-bit floats carry scales that archon would have to know of.
WEIGHT_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class HFCheckpoint:
    """An open checkpoint folder: `entries` and the `files` that hold them, by key. Headers and index are checked.

    Raises CheckpointError naming file and key for whatever is missing, damaged, contradictory or outside the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = existing_folder(path)
        self.files: dict[str, SafetensorsFile] = {}
        self.entries: dict[str, TensorEntry] = {}
        index, single = self.path / INDEX_FILE, self.path / WEIGHTS_FILE
        if index.exists() and single.exists():
            refuse(self.path, f"it holds both {INDEX_FILE} and {WEIGHTS_FILE}; remove the one that is stale")
        with ExitStack() as opened:
            if index.exists():
                self._open_shards(index, opened)
            elif single.exists():
                self._open(WEIGHTS_FILE, opened)
            else:
                _refuse_without_weights(self.path)
            self._opened = opened.pop_all()

    def _open(self, name: str, opened: ExitStack) -> SafetensorsFile:
        _require_inside(self.path, name)
        file = opened.enter_context(SafetensorsFile(self.path / name))
        for key, entry in file.entries.items():
            if key in self.entries:
                refuse(file.path, f"key {key!r} stands in {self.files[key].path.name} as well; it must stand once")
            self.entries[key], self.files[key] = entry, file
        return file

    def _open_shards(self, index: Path, opened: ExitStack) -> None:
        weight_map = _read_weight_map(index)
        for name in sorted({*weight_map.values()}):
            if not (self.path / name).exists():
                key = next(key for key, shard in weight_map.items() if shard == name)
                refuse(index, f"key {key!r} is said to be in {name}, which does not exist")
            self._open(name, opened)
        for key, name in weight_map.items():
            if key not in self.entries:
                refuse(self.path / name, f"key {key!r}, which {INDEX_FILE} places here, is missing")
            if self.files[key].path.name != name:
                refuse(
                    self.path / name, f"key {key!r}, which {INDEX_FILE} places here, is in {self.files[key].path.name}"
                )
        for key, file in self.files.items():
            if key not in weight_map:
                refuse(file.path, f"key {key!r} is not listed in {INDEX_FILE}")

    def where(self, key: str) -> Path:
        """The file that holds a key."""
        return self.files[key].path

    def same_bytes(self, key: str, other: str) -> bool:
        """Whether two tensors are bitwise equal, dtype and shape included."""
        first, second = self.entries[key], self.entries[other]
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        buffers = torch.empty(2, PIECE_BYTES, dtype=torch.uint8)
        for offset in range(0, first.end - first.start, PIECE_BYTES):
            count = min(PIECE_BYTES, first.end - first.start - offset)
            for name, entry, buffer in ((key, first, buffers[0]), (other, second, buffers[1])):
                self.files[name].read_into(bytes_of(buffer)[:count], entry.start + offset, f"key {name!r}")
            if not torch.equal(buffers[0, :count], buffers[1, :count]):
                return False
        return True

    def read(self, targets: Iterable[Target]) -> None:
        """Fill each tensor, of any device, layout and float dtype, with its part of the key."""
        ordered = sorted(targets, key=lambda t: (str(self.where(t.key)), self.entries[t.key].start))
        jobs = [job for target in ordered for job in self._pieces(target)]
        reader = _PieceReader()
        with (
            _single_threaded_workers(),
            ThreadPoolExecutor(READERS, initializer=torch.set_num_threads, initargs=(1,)) as pool,
        ):
            for _ in pool.map(reader.read, jobs):
                pass

    def _pieces(self, target: Target) -> Iterator[_Piece]:
        file, entry, (rows, *inner) = self.files[target.key], self.entries[target.key], target.part
        itemsize, row = entry.dtype.itemsize, math.prod(entry.shape[1:])
        first = entry.start + rows.start * row * itemsize
        if all(part == slice(0, size) for part, size in zip(inner, entry.shape[1:], strict=True)):
            for offset, piece in pieces(target.tensor, itemsize):
                yield _Piece(file, target.key, entry.dtype, first + offset, piece)
        elif target.tensor.numel():
            # Columns of a matrix: whole rows are read, since the neighbours' parts are in the same pages.
            step = max(1, PIECE_BYTES // (row * itemsize))
            for start in range(0, rows.stop - rows.start, step):
                part = target.tensor[start : start + step]
                yield _Piece(file, target.key, entry.dtype, first + start * row * itemsize, part, (row, inner[0]))

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Target(NamedTuple):
    """A tensor, and the part of a key's tensor that fills it: one slice a dimension, of its own shape."""

    key: str
    tensor: Tensor
    part: tuple[slice, ...]


@dataclass(frozen=True)
class _Piece:
    """A stretch of a file, of `dtype` from byte `offset`, and the view that it fills: wholly, or with the columns
    (length of a row in the file, which of it)."""

    file: SafetensorsFile
    key: str
    dtype: torch.dtype
    offset: int
    target: Tensor
    columns: tuple[int, slice] | None = None


class _PieceReader:
    """Reads pieces in any number of threads, with one buffer each for those that cannot be read in place."""

    def __init__(self) -> None:
        self._buffers = threading.local()

    def read(self, piece: _Piece) -> None:
        target = piece.target
        if target.device.type != "cpu" or not target.is_contiguous():
            self._read_through_buffer(piece)
            return
        prefault(target)
        if target.dtype == piece.dtype and piece.columns is None:
            piece.file.read_into(bytes_of(target), piece.offset, f"key {piece.key!r}")
        else:
            self._read_through_buffer(piece)

    def _read_through_buffer(self, piece: _Piece) -> None:
        target = piece.target
        if not hasattr(self._buffers, "bytes"):
            self._buffers.bytes = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=target.is_cuda)
        shape = target.shape if piece.columns is None else (target.shape[0], piece.columns[0])
        size = math.prod(shape) * piece.dtype.itemsize
        if size > self._buffers.bytes.numel():  # a single row wider than a piece
            self._buffers.bytes = torch.empty(size, dtype=torch.uint8, pin_memory=target.is_cuda)
        staged = self._buffers.bytes[:size]
        piece.file.read_into(bytes_of(staged), piece.offset, f"key {piece.key!r}")
        whole = staged.view(piece.dtype).view(shape)
        if piece.columns is not None:
            whole = whole[:, piece.columns[1]]
        # To a GPU in the dtype of the file, converted there: fewer bytes on the bus, no second buffer here.
        target.copy_(whole.to(target.device))


@contextmanager
def _single_threaded_workers() -> Iterator[None]:
    """Within, `torch.set_num_threads(1)` may be called in worker threads; this thread and later ones keep their
    number.

    PyTorch keeps the number for each thread, and the last one set for threads that are yet to start.
    """
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def load_hf_weights(model: nn.Module, adapter: BaseStateDictAdapter, path: str | os.PathLike[str]) -> None:
    """Load a checkpoint into the parameters of a materialised model, whatever their dtype, layout and device.

    The adapter says what to expect: a critic made from an actor (`init_score`) keeps its `score` and drops `lm_head`.
    A tied checkpoint that also ships `lm_head.weight` is accepted only where the two are bitwise equal.

    Raises CheckpointError naming file and key unless every key and every parameter is used exactly once; no weight has
    been touched then.
    """
    with HFCheckpoint(path) as checkpoint:
        checkpoint.read(match_parameters(checkpoint, model, adapter))


def match_parameters(checkpoint: HFCheckpoint, model: nn.Module, adapter: BaseStateDictAdapter) -> list[Target]:
    """What each key fills: a parameter or the row of a stacked one, of those the part that this rank holds.

    Errors are those of `load_hf_weights`.
    """
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    whole = not hasattr(model, "stages")  # a pipeline's rank leaves to others what it does not hold
    expected = adapter.hf_shapes()
    if "score.weight" in expected and "score.weight" not in checkpoint.entries:
        refuse(
            checkpoint.path,
            "key 'score.weight' missing from its weights; for a critic made from an actor set init_score=True",
        )
    ties, targets, filled = list[tuple[str, str]](), list[Target](), set[str]()
    for key in checkpoint.entries:
        try:
            target = adapter.hf_to_native(key)
        except CheckpointError as error:
            refuse(checkpoint.where(key), str(error))
        if target.name is None:
            continue
        if target.must_equal:
            ties.append((key, target.name))
            continue
        if whole or target.name in parameters:
            destination = _destination(checkpoint, key, target, parameters, expected)
            if destination is not None:
                targets.append(destination)
        if target.name == "tok_embeddings.weight" and "output.weight" in parameters and adapter.is_tied:
            head = parameters["output.weight"]
            targets.append(Target(key, local_tensor(head), own_part(head)))
            filled.add("output.weight")
        filled.add(target.name)
    missing = [key for key in expected if key not in checkpoint.entries]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        refuse(checkpoint.path, f"key {missing[0]!r}{more} missing from its weights")
    filled |= {*adapter.native_names()} - {*adapter.loadable_names()}
    for name in parameters:
        if name not in filled:
            refuse(checkpoint.path, f"no key fills the model's parameter {name!r}; is the adapter of another config?")
    for key, name in ties:
        _require_tie(checkpoint, key, adapter.to_hf_map[name])
    return targets


def _destination(
    checkpoint: HFCheckpoint,
    key: str,
    target: NativeTarget,
    parameters: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]],
) -> Target | None:
    """What a key fills, its shape and dtype checked against the config and against the model; None where other ranks
    hold all of it."""
    file, entry = checkpoint.where(key), checkpoint.entries[key]
    assert target.name is not None
    if key not in expected:
        refuse(file, f"key {key!r} would fill parameter {target.name!r} a second time")
    if entry.shape != expected[key]:
        refuse(file, f"key {key!r} has shape {list(entry.shape)}, the config asks for {list(expected[key])}")
    if entry.dtype not in WEIGHT_DTYPES:
        refuse(file, f"key {key!r} is {entry.dtype}; weights must be float64, float32, float16 or bfloat16")
    if target.name not in parameters:
        refuse(file, f"key {key!r} is parameter {target.name!r}, which the model does not have")
    parameter = parameters[target.name]
    shape = tuple(parameter.shape if target.index is None else parameter.shape[1:])
    if shape != entry.shape:
        refuse(
            file,
            f"key {key!r} has shape {list(entry.shape)}, the model's parameter {target.name!r} "
            f"{list(shape)}; is the model of another config?",
        )
    own, part = local_tensor(parameter), own_part(parameter)
    if target.index is None:
        return Target(key, own, part)
    if not part[0].start <= target.index < part[0].stop:
        return None
    return Target(key, own[target.index - part[0].start], part[1:])


def _require_tie(checkpoint: HFCheckpoint, key: str, embedding: str) -> None:
    if not checkpoint.same_bytes(key, embedding):
        refuse(
            checkpoint.where(key),
            f"key {key!r} differs from {embedding!r}, though the config ties them; "
            "set tie_word_embeddings to false, or remove the key",
        )


def read_hf_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The parsed `config.json` of a checkpoint folder; `model_type` is there and a string.

    Raises CheckpointError where the folder or the file is missing, or is not a model's config.
    """
    folder = existing_folder(path)
    file = folder / CONFIG_FILE
    if not file.is_file():
        refuse(folder, f"it is not a checkpoint: it holds no {CONFIG_FILE}")
    config = _read_json(file)
    if not isinstance(config.get("model_type"), str):
        refuse(file, f"model_type is {config.get('model_type')!r}; expected the name of a family, such as 'qwen3'")
    return config


def existing_folder(path: str | os.PathLike[str]) -> Path:
    """`path` as a folder that exists; CheckpointError otherwise."""
    folder = Path(path)
    if not folder.exists():
        is_hub_name = not folder.is_absolute() and len(folder.parts) == 2
        hint = f"; a model of the hub is fetched by: hf download {path} --local-dir FOLDER" if is_hub_name else ""
        refuse(folder, f"it does not exist; expected the folder of a checkpoint{hint}")
    if not folder.is_dir():
        refuse(folder, "it is a file; expected the folder of a checkpoint")
    return folder


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        refuse(index, "weight_map is missing or empty; expected {key: file}")
    for key, name in weight_map.items():
        if not isinstance(name, str) or name != os.path.basename(name) or not name.endswith(".safetensors"):
            refuse(index, f"key {key!r} is said to be in {name!r}; expected a .safetensors file of the same folder")
    return weight_map


def _require_inside(folder: Path, name: str) -> None:
    """Refuse a link that leads out of the checkpoint; the hub's cache links snapshots/<commit>/* to blobs/*."""
    real, home = (folder / name).resolve(), folder.resolve()
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(real.parent == allowed for allowed in homes):
        refuse(folder / name, f"it is a link to {real}, outside the checkpoint; put the file itself there")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        refuse(file, f"cannot be read: {what_ran_out(error) or os.strerror(error.errno or 0)}")
    except (ValueError, RecursionError) as error:
        refuse(file, f"it is not JSON ({error})")
    if not isinstance(content, dict):
        refuse(file, f"expected a JSON object, got {type(content).__name__}")
    return content


def _refuse_without_weights(folder: Path) -> NoReturn:
    pickled = sorted(f.name for f in folder.iterdir() if f.suffix in {".bin", ".pt", ".pth", ".ckpt", ".pkl"})
    if pickled:
        refuse(
            folder,
            f"its weights are pickled ({pickled[0]}); reading them could run any code, so archon reads safetensors "
            "only: convert them with transformers' save_pretrained",
        )
    refuse(folder, f"it holds no weights: neither {WEIGHTS_FILE} nor {INDEX_FILE}")
