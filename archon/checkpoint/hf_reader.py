"""Read Hugging Face checkpoints into an allocated model.

Headers, index, keys and parameters are checked before the first weight is written; each key and parameter must be used
exactly once. The data is then read in chunks directly into the parameters' memory, or through one small buffer per
thread if dtype, layout or device differ.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor, nn

from archon.checkpoint.hub import CONFIG_FILE, checkpoint_folder, config_file
from archon.checkpoint.other_folders import advice_on_weights
from archon.checkpoint.quantized import StoredTensor, stored_tensors, weight_key
from archon.checkpoint.safetensors_file import (
    LazyTensor,
    Region,
    SafetensorsFile,
    TensorEntry,
    bitwise_equal,
    fail,
    unique_keys,
)
from archon.checkpoint.tensor_reader import JobReader, RowDecoder, Source, lazy_tensor, read_jobs
from archon.models.hf.state_dict import BaseStateDictAdapter, NativeTarget
from archon.models.lora.model import is_lora
from archon.models.lora.quantized_base import is_quantized, quantized_weights
from archon.parallel.fsdp import local_region, local_tensor
from archon.schema.errors import CheckpointError, ConfigError
from archon.schema.files import JSON_BYTES, read_limited

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Reading releases the GIL and one thread saturates a core; the second one hides the time of page faults.
READERS = 2
# Integers and FP8 need scales, which only quantized checkpoints declare (`quantized.py`).
WEIGHT_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class HFCheckpoint:
    """An open checkpoint folder with validated headers and index: `entries` and their `files`, by key.

    Opening raises CheckpointError with file and key if data is missing, damaged, contradictory or outside the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = checkpoint_folder(path)
        self.files: dict[str, SafetensorsFile] = {}
        self.entries: dict[str, TensorEntry] = {}
        index, single = self.path / INDEX_FILE, self.path / WEIGHTS_FILE
        # A broken link or a pipe exists too; opening it names the mistake.
        has_index, has_single = os.path.lexists(index), os.path.lexists(single)
        if has_index and has_single:
            fail(self.path, f"it holds both {INDEX_FILE} and {WEIGHTS_FILE}; remove the one that is stale")
        with ExitStack() as opened:
            if has_index:
                self._open_shards(index, opened)
            elif has_single:
                self._open(WEIGHTS_FILE, opened)
            else:
                _require_weight_files(self.path)
            self._opened = opened.pop_all()

    def _open(self, name: str, opened: ExitStack) -> SafetensorsFile:
        _check_inside(self.path, name)
        file = opened.enter_context(SafetensorsFile(self.path / name))
        for key, entry in file.entries.items():
            if key in self.entries:
                fail(file.path, f"key {key!r} is also in {self.files[key].path.name}; expected each key in one file")
            self.entries[key], self.files[key] = entry, file
        return file

    def _open_shards(self, index: Path, opened: ExitStack) -> None:
        weight_map = _read_weight_map(index)
        for name in sorted({*weight_map.values()}):
            if not (self.path / name).exists():
                key = next(key for key, shard in weight_map.items() if shard == name)
                fail(index, f"it lists key {key!r} in {name}, which does not exist; copy that file into the folder")
            self._open(name, opened)
        for key, name in weight_map.items():
            if key not in self.entries:
                fail(self.path / name, f"key {key!r} is missing, though {INDEX_FILE} lists it in this file")
            if self.files[key].path.name != name:
                actual = self.files[key].path.name
                fail(self.path / name, f"key {key!r} is in {actual}, though {INDEX_FILE} lists it in this file")
        for key, file in self.files.items():
            if key not in weight_map:
                fail(file.path, f"key {key!r} is not listed in {INDEX_FILE}")

    def tensors(self, adapter: BaseStateDictAdapter) -> dict[str, StoredTensor]:
        """Return all stored tensors, passthrough ones included, by the key of their weight; see `stored_tensors`."""
        weights = {weight_key(key, adapter.quantization) for key in self.entries}
        known = {*adapter.hf_shapes(), *filter(adapter.is_passthrough, weights)}
        return stored_tensors(self.entries, self.files, adapter.quantization, known)

    def passthrough(self, adapter: BaseStateDictAdapter, dtype: torch.dtype) -> dict[str, LazyTensor]:
        """Return the passthrough tensors unchanged; quantized ones are dequantized to `dtype`.

        Args:
            adapter: adapter of this checkpoint's config.
            dtype: dtype of dequantized tensors.

        Raises:
            CheckpointError: a quantized tensor is packed, and the family does not declare its orientation.
        """
        reader = adapter.for_keys(self.entries)
        stored = {key: tensor for key, tensor in self.tensors(reader).items() if reader.is_passthrough(key)}
        for key, tensor in stored.items():
            if tensor.is_native:
                fail(tensor.file.path, f"key {key!r} is packed, and this family does not declare its orientation")
        lazy = {key: tensor.lazy(dtype, transposed=False) for key, tensor in stored.items()}
        return {adapter.passthrough_name(key, reader): tensor for key, tensor in lazy.items()}

    def is_bitwise_equal(self, key: str, other: str) -> bool:
        """Return whether two tensors are bitwise equal, dtype and shape included."""
        first, second = (lazy_tensor(self.files[name], self.entries[name]) for name in (key, other))
        return bitwise_equal(first, second)

    def read(self, targets: Iterable[ReadTarget]) -> None:
        """Fill the tensors of `targets`, of any device, layout and float dtype."""
        ordered = sorted(targets, key=lambda t: (str(self.files[t.key].path), self.entries[t.key].start))
        jobs = [
            job
            for t in ordered
            for job in read_jobs(Source(self.files[t.key], self.entries[t.key], t.decoder, t.shape), t.region, t.tensor)
        ]
        reader = JobReader()
        # Each worker uses one thread. PyTorch keeps this number per thread, but new threads inherit the last number
        # set anywhere, so this thread restores its number.
        threads = torch.get_num_threads()
        try:
            with ThreadPoolExecutor(READERS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                for _ in pool.map(reader.read, jobs):
                    pass
        finally:
            torch.set_num_threads(threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


class ReadTarget(NamedTuple):
    """A tensor to fill from an equally shaped region of a stored tensor.

    The stored tensor is viewed as `shape` (by default its stored shape) and decoded by `decoder` if set.
    """

    key: str
    tensor: Tensor
    region: Region
    shape: tuple[int, ...] | None = None
    decoder: RowDecoder | None = None


@torch.no_grad()
def load_hf_weights(model: nn.Module, adapter: BaseStateDictAdapter, path: str | os.PathLike[str]) -> None:
    """Load a checkpoint into the allocated parameters of a model, of any dtype, layout and device.

    An adapter that overrides `from_hf` gets all tensors at once, in memory.

    The adapter defines the expected keys: a critic built from an actor (`init_score`) keeps its `score`, and `lm_head`
    is not loaded. A tied checkpoint may also have an `lm_head.weight` that is bitwise equal to the embedding.

    Raises:
        CheckpointError: a key or a parameter is not used exactly once. No weight has been written then.
    """
    with HFCheckpoint(path) as checkpoint:
        if "from_hf" in adapter.overrides:
            stored = {k: tensor for k, tensor in checkpoint.tensors(adapter).items() if not adapter.is_passthrough(k)}
            state = {key: tensor.lazy(torch.float32, transposed=False).read() for key, tensor in stored.items()}
            copy_hf_weights(model, adapter, state)
        else:
            checkpoint.read(match_parameters(checkpoint, model, adapter))
            _read_quantized(checkpoint, model, adapter.for_keys(checkpoint.entries))


def _read_quantized(checkpoint: HFCheckpoint, model: nn.Module, adapter: BaseStateDictAdapter) -> None:
    """Quantize the matrices of a quantized base, one whole matrix in memory at a time.

    Every rank reads whole matrices, because a scale of scales spans rows of several ranks.
    """
    weights = quantized_weights(model)
    sources: dict[str, list[tuple[str, StoredTensor, NativeTarget]]] = {name: [] for name in weights}
    for key, tensor in checkpoint.tensors(adapter).items() if weights else ():
        for target in adapter.hf_to_native(key):
            if target.name in weights:
                sources[target.name].append((key, tensor, target))
    for name, quantized in weights.items():
        whole = torch.empty(quantized.shape)
        checkpoint.read([read for source in sources[name] for read in _read_targets(*source, whole, adapter)])
        quantized.quantize_(whole, name)


def require_shapes(path: str | os.PathLike[str], adapter: BaseStateDictAdapter) -> None:
    """Raise CheckpointError if the shape of a stored tensor contradicts the config.

    A config can claim any size, and a file holds the tensors that its header lists. Call this before memory is
    allocated, so that the config's claims take none. `load_hf_weights` then checks everything else.
    """
    if adapter.overrides:  # its map does not describe the tensors
        return
    with HFCheckpoint(path) as checkpoint:
        if adapter.args.n_layers > len(checkpoint.entries):
            fail(
                checkpoint.path / CONFIG_FILE,
                f"it claims {adapter.args.n_layers} layers, but the weights have {len(checkpoint.entries)} tensors",
            )
        adapter = adapter.for_keys(checkpoint.entries)
        expected = adapter.hf_shapes()
        for key, tensor in checkpoint.tensors(adapter).items():
            for target in adapter.hf_to_native(key) if key in expected else ():
                if not target.must_equal:
                    _check_stored(key, tensor, target, expected[key])


@torch.no_grad()
def copy_hf_weights(model: nn.Module, adapter: BaseStateDictAdapter, state: Mapping[str, Tensor]) -> None:
    """Copy a Hugging Face state dict into the parameters of a model, through the family's `from_hf`.

    Raises:
        CheckpointError: a key or a parameter is not used exactly once, or a weight is an integer.
    """
    native, quantized = adapter.load_hf(state), quantized_weights(model)
    for name, tensor in loadable_tensors(model, adapter).items():
        source = "tok_embeddings.weight" if name == "output.weight" and adapter.is_tied else name
        if source not in native:  # a new score head
            continue
        if native[source].dtype not in WEIGHT_DTYPES:
            raise CheckpointError(f"parameter {name!r} is {native[source].dtype}; dequantize the model first")
        if name in quantized:
            quantized[name].quantize_(native[source], name)
        else:
            local_tensor(tensor).copy_(native[source][local_region(tensor)])


def match_parameters(checkpoint: HFCheckpoint, model: nn.Module, adapter: BaseStateDictAdapter) -> list[ReadTarget]:
    """Return the reads that fill this rank's parameters; raise CheckpointError like `load_hf_weights`."""
    adapter = adapter.for_keys(checkpoint.entries)
    local = loadable_tensors(model, adapter)
    holds_all = not hasattr(model, "stages")  # a pipeline rank holds only its stages' parameters
    expected = adapter.hf_shapes()
    if "score.weight" in expected and "score.weight" not in checkpoint.entries:
        fail(
            checkpoint.path,
            "key 'score.weight' missing from its weights; to build a critic from an actor set init_score=True",
        )
    ties, read_targets, filled = list[tuple[str, str]](), list[ReadTarget](), set[str]()
    stored = checkpoint.tensors(adapter)
    for key, tensor in stored.items():
        file = tensor.file.path
        try:
            targets = adapter.hf_to_native(key)
        except CheckpointError as error:
            fail(file, str(error))
        for target in targets:
            if target.must_equal:
                ties.append((key, target.name))
                continue
            _check_stored(key, tensor, target, expected[key])
            if target.name in local:
                # The matrices of a quantized base are on the meta device; `_read_quantized` reads them.
                if not local[target.name].is_meta:
                    read_targets += _read_targets(key, tensor, target, local[target.name], adapter)
            elif holds_all:
                fail(file, f"key {key!r} is parameter {target.name!r}, which the model does not have")
            if target.name == "tok_embeddings.weight" and "output.weight" in local and adapter.is_tied:
                head = local["output.weight"]
                read_targets += _read_targets(key, tensor, target, head, adapter)
                filled.add("output.weight")
            filled.add(target.name)
    missing = [key for key in expected if key not in stored]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        fail(checkpoint.path, f"key {missing[0]!r}{more} missing from its weights")
    filled |= {*adapter.stored_shapes} - {*adapter.loadable_names()}
    for name in local:
        if name not in filled:
            fail(
                checkpoint.path,
                f"no key fills the model's parameter {name!r}; does the adapter belong to another config?",
            )
    for key, name in ties:
        embedding = adapter.to_hf_map[name]  # or the head, for a copy of it in an MTP layer
        if not checkpoint.is_bitwise_equal(key, embedding):
            fail(checkpoint.files[key].path, f"key {key!r} {adapter.tie_complaint(key)}")
    return read_targets


def loadable_tensors(model: nn.Module, adapter: BaseStateDictAdapter) -> dict[str, Tensor]:
    """Return the tensors of a model that a checkpoint fills: parameters, and buffers in the adapter's map.

    The matrices of a quantized base are whole tensors on the meta device.
    """
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in adapter.buffer_shapes}
    parameters = model.named_parameters()
    plain = {name: p.detach() for name, p in parameters if not is_lora(name) and not is_quantized(name)}
    quantized = {name: torch.empty(weight.shape, device="meta") for name, weight in quantized_weights(model).items()}
    return plain | quantized | buffers


def _check_stored(key: str, stored: StoredTensor, target: NativeTarget, expected: tuple[int, ...]) -> None:
    """Raise CheckpointError if the shape or the dtype of a key contradicts the config."""
    if stored.is_native and target.is_transposed:
        expected = (*expected[:-2], expected[-1], expected[-2])
    name, file = stored.entry.name, stored.file.path
    if stored.shape != expected:
        verb = "has shape" if name == key else "stands for shape"
        hint = ""
        if target.name in ("tok_embeddings.weight", "output.weight") and stored.shape[1:] == expected[1:]:
            hint = f"; if the vocabulary was resized, set vocab_size of {CONFIG_FILE} to {stored.shape[0]}"
        fail(file, f"key {name!r} {verb} {list(stored.shape)}, expected {list(expected)} by its config{hint}")
    if stored.decoder is None and stored.entry.dtype not in WEIGHT_DTYPES:
        fail(file, f"key {key!r} is {stored.entry.dtype}; weights must be float64, float32, float16 or bfloat16")


def _read_targets(
    key: str, stored: StoredTensor, target: NativeTarget, parameter: Tensor, adapter: BaseStateDictAdapter
) -> Iterator[ReadTarget]:
    """Yield the reads of a key for this rank's part of a parameter.

    Raises:
        CheckpointError: the shape of the parameter contradicts the config.
    """
    expected = adapter.stored_shapes[target.name]
    if tuple(parameter.shape) != expected:
        fail(
            stored.file.path,
            f"key {key!r} fills a parameter of shape {list(expected)}, but the model's parameter {target.name!r} "
            f"has {list(parameter.shape)}; was the model built from another config?",
        )
    local, region = local_tensor(parameter), local_region(parameter)
    if target.index is not None:
        if not region[0].start <= target.index < region[0].stop:
            return
        local, region, expected = local[target.index - region[0].start], region[1:], expected[1:]
    name, decoder = stored.entry.name, stored.decoder
    if target.placement is None:
        yield ReadTarget(name, local, region, stored.shape, decoder)
        return
    transposed = target.is_transposed and not stored.is_native
    for part in target.placement.selections(expected, region, local, transposed=transposed):
        yield ReadTarget(name, part.target, part.region, part.shape, decoder)


def read_hf_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the parsed `config.json` of a checkpoint folder or a hub id; its `model_type` is a string.

    Raises:
        CheckpointError: the folder or the file is missing, or the file is not a model config.
    """
    file = config_file(path)
    config = read_json(file)
    if not isinstance(config.get("model_type"), str):
        fail(
            file,
            f"model_type is {config.get('model_type')!r}; expected a supported type, for example 'qwen3'",
        )
    return config


def config_dtype(hf_config: dict[str, Any]) -> torch.dtype:
    """Return the config's `dtype` or the older `torch_dtype`; float32 by default."""
    name = hf_config.get("dtype") or hf_config.get("torch_dtype") or "float32"
    dtype = getattr(torch, name.removeprefix("torch."), None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype) or dtype not in WEIGHT_DTYPES:
        raise ConfigError(
            f"config field 'dtype' is {name!r:.200}; expected float64, float32, float16 or bfloat16, the dtypes of "
            "weights without scales"
        )
    return dtype


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        fail(index, "weight_map is missing or empty; expected {key: file}")
    for key, name in weight_map.items():
        if not isinstance(name, str) or name != os.path.basename(name) or not name.endswith(".safetensors"):
            fail(index, f"it lists key {key!r} in {name!r}; expected a .safetensors file in the same folder")
    return weight_map


def _check_inside(folder: Path, name: str) -> None:
    """Raise CheckpointError for a link out of the checkpoint, except into blobs/* of the hub's cache."""
    # Path.resolve raises RuntimeError for a loop of links; opening the file names the loop.
    real, home = (Path(os.path.realpath(path)) for path in (folder / name, folder))
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(real.parent == allowed for allowed in homes):
        fail(folder / name, f"it is a link to {real}, outside the checkpoint; copy the file into the folder instead")


def read_json(file: Path, max_bytes: int = JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object; raise CheckpointError if it is missing, larger than `max_bytes` or malformed."""
    data = read_limited(file, max_bytes, CheckpointError)
    try:
        content = json.loads(data.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        fail(file, f"it is not JSON ({error})")
    if not isinstance(content, dict):
        fail(file, f"expected a JSON object, got {type(content).__name__}")
    return content


def _require_weight_files(folder: Path) -> NoReturn:
    pickled = sorted(f.name for f in folder.iterdir() if f.suffix in {".bin", ".pt", ".pth", ".ckpt", ".pkl"})
    if pickled:
        fail(
            folder,
            f"its weights are pickled ({pickled[0]}); unpickling can run arbitrary code, so archon reads only "
            "safetensors: convert them with transformers' save_pretrained",
        )
    if text := advice_on_weights(folder):
        fail(folder, f"it holds no weights in {WEIGHTS_FILE}; {text}")
    fail(
        folder,
        f"it holds no weights: expected {WEIGHTS_FILE} or {INDEX_FILE}; to train random weights, set init_from_scratch",
    )
