"""Agreement of ranks: one configuration, the same packages, code and files on every rank of a run.

Ranks that differ train one model on several configurations, checkpoints or datasets, and no loss curve shows it. Rank 0
broadcasts its facts, every rank compares them with its own, and all ranks raise the first difference.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import importlib.machinery
import importlib.metadata
import json
import os
import platform
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from pydantic import BaseModel

import archon
from archon.checkpoint.hf_io import checkpoint_digest
from archon.checkpoint.hub import CONFIG_FILES, WEIGHT_FILES, model_folder
from archon.parallel.control_plane import ControlPlane
from archon.schema.config import EngineConfig
from archon.schema.errors import ConfigError

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
"""Packages that must have the same version on all ranks, because their version can change results."""
NUMERIC_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCHDYNAMO_DISABLE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TRITON_F32_DEFAULT",
    "TRITON_INTERPRET",
)
"""Environment variables that must be equal on all ranks, because they select the precision or the order of sums of
kernels and collectives. Numbers of threads and names of network devices may differ."""
SAMPLED_BYTES = 2**25
"""Bytes that the digest of a folder reads: 20 ms from the page cache. Small files are read whole, large ones in evenly
spaced chunks."""
CHUNK_BYTES = 2**16
MAX_FILES = 1000
"""Maximum number of files of a folder that are compared, in the order of their names."""
SHOWN_CHARACTERS = 200
"""Maximum characters of a value in a message."""

_INPUTS = ("path", "tokenizer", "data_dir")
_CHANGING = ("experiences",)
"""Sections that are not compared, because other processes write their files during a run."""
_DOTTED_PATH = re.compile(r"(?:python:)?([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)")
_MISSING = "nothing"
SAME_FILES = "every machine needs the same files"


class Facts(NamedTuple):
    """Values that must be equal on all ranks.

    Attributes:
        remedy: what to do if they differ.
        values: JSON values by name; sections are compared field by field.
    """

    remedy: str
    values: dict[str, Any]


def require_agreement(world: ControlPlane, facts: Sequence[Facts]) -> None:
    """Raise ConfigError on every rank if a fact of one rank differs from rank 0's. A collective.

    The message names the first difference, its rank and both values.
    """
    if world.size == 1:
        return
    local = json.loads(json.dumps(facts))
    main = world.broadcast_json(lambda: facts)
    found = next((found for pair in zip(local, main, strict=True) if (found := _difference(*pair))), None)
    for rank, text in enumerate(world.all_gather(json.dumps(found).encode())):
        if (difference := json.loads(text)) is not None:
            name, value, main_value, remedy = difference
            raise ConfigError(f"rank {rank} has {name}={value}, rank 0 has {main_value}; {remedy}")


def _difference(local: tuple[str, Any], main: tuple[str, Any]) -> tuple[str, str, str, str] | None:
    found = next(_differences(local[1], main[1], ""), None)
    return None if found is None else (*found, main[0])


def _differences(local: Any, main: Any, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the local text and the main text of each difference, in the order of rank 0's fields."""
    if isinstance(local, dict) and isinstance(main, dict):
        for key in [*main, *(local.keys() - main.keys())]:
            inner = f"{name}.{key}" if name else key
            yield from _differences(local.get(key, _MISSING), main.get(key, _MISSING), inner)
    elif json.dumps(local) != json.dumps(main):  # 1 and 1.0 and true are equal in Python
        yield name, _shown(local), _shown(main)


def _shown(value: Any) -> str:
    is_plain = isinstance(value, str) and value.strip() and value.isprintable()
    text = value if is_plain else json.dumps(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"


def package_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of archon, Python and `packages`."""
    versions = {"archon": archon.__version__, "python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # a source or vendored build
            versions[package] = "not installed"
    return versions


def require_same_engine(config: EngineConfig, total_steps: int | None) -> None:
    """Require that all ranks initialize the same model: configuration, packages, archon's code and checkpoint."""
    world = ControlPlane.world()
    if world.size == 1 or dist.get_backend() == "fake":  # a dry run
        return
    fields, files = config_facts(config), input_facts(config)
    fields.values["total_steps"] = total_steps
    folder = model_folder(config.path, CONFIG_FILES if config.init_from_scratch else WEIGHT_FILES)
    if folder != Path(config.path):
        files.values[config.path] = f"commit {folder.name}"  # of the hub
    if not config.init_from_scratch:  # finds differences in tensors between the chunks of `file_digests`
        files.values[f"tensors of {config.path}"] = f"digest {checkpoint_digest(folder)}"
    require_agreement(world, [software_facts(), numeric_facts(), fields, files])


def require_same_run(config: BaseModel) -> None:
    """Require that all ranks start the same run: configuration, packages, archon's code and the code it names.

    Only `run_dir` may differ, because it often contains the time; every rank uses rank 0's.
    """
    world = ControlPlane.world()
    if world.size > 1:
        facts = [software_facts(), numeric_facts(), config_facts(config, free=["run_dir"]), code_facts(config)]
        require_agreement(world, facts)


def require_same_inputs(config: BaseModel) -> None:
    """Require that all ranks find the same checkpoints, tokenizers, LoRAs and data."""
    world = ControlPlane.world()
    if world.size > 1:
        require_agreement(world, [input_facts(config)])


def require_same_files(folder: Path) -> None:
    """Require that all ranks find the same files in a folder and its subfolders."""
    world = ControlPlane.world()
    if world.size > 1:
        require_agreement(world, [Facts(SAME_FILES, file_digests(str(folder), split=""))])


def software_facts() -> Facts:
    """Return the versions of packages and the digest of archon's code."""
    values = {**package_versions(), "archon's code": _archon_digest()}
    return Facts("install the same packages on every machine", values)


def numeric_facts() -> Facts:
    """Return the environment variables and the options of torch that change the results of kernels."""
    values: dict[str, Any] = {name: os.environ.get(name, "unset") for name in NUMERIC_VARIABLES}
    values["torch.get_float32_matmul_precision()"] = torch.get_float32_matmul_precision()
    values["torch.are_deterministic_algorithms_enabled()"] = torch.are_deterministic_algorithms_enabled()
    values["torch.get_default_dtype()"] = str(torch.get_default_dtype())
    return Facts("start every rank with the same environment and options of torch", values)


@functools.cache
def _archon_digest() -> str:
    root = Path(archon.__file__).parent
    digest = hashlib.blake2b(digest_size=8)
    for path, folders, names in os.walk(root, followlinks=True):  # a checkout links archon/models to models
        folders.sort()
        for name in sorted(name for name in names if name.endswith(".py")):
            digest.update(name.encode(errors="surrogateescape"))
            digest.update(Path(path, name).read_bytes())
    return f"digest {digest.hexdigest()}"


def config_facts(config: BaseModel, *, free: Sequence[str] = ()) -> Facts:
    """Return all fields of a configuration except the top-level ones in `free`."""
    values = config.model_dump(mode="json", exclude=set(free))
    return Facts("start every rank with the same configuration", values)


def code_facts(config: BaseModel) -> Facts:
    """Return digests of the source files that the dotted paths of a configuration name.

    For a module in a package, all Python files of its folder are compared. Nothing is imported.
    """
    values: dict[str, str] = {}
    for text in _texts(config.model_dump(mode="json")):
        match = _DOTTED_PATH.fullmatch(text)
        if match and not text.startswith("archon.") and (source := find_source(match[1])) is not None:
            folder = source.parent if "." in match[1].rpartition(".")[0] else None
            names = [file.name for file in sorted(folder.glob("*.py"))] if folder else [source.name]
            values |= {f"{match[1]} ({name})": text for name, text in _digests(source.parent, names).items()}
    return Facts("every machine needs the same code", values)


def find_source(dotted: str) -> Path | None:
    """Return the file of the longest prefix of a dotted path that is a module; None if there is none."""
    folders: Sequence[str] | None = None
    source, module = None, ""
    for part in dotted.split("."):
        module = f"{module}.{part}" if module else part
        spec = importlib.machinery.PathFinder.find_spec(module, folders or sys.path)
        if spec is None:
            break
        if spec.origin is not None and spec.origin.endswith(".py"):
            source = Path(spec.origin)
        if spec.submodule_search_locations is None:
            break
        folders = list(spec.submodule_search_locations)
    return source


def input_facts(config: BaseModel) -> Facts:
    """Return sizes and digests of the checkpoints, tokenizers, LoRAs and data that a configuration names by path."""
    values: dict[str, str] = {}
    for path, split in input_paths(config.model_dump(mode="json")):
        values |= file_digests(path, split)
    return Facts(SAME_FILES, values)


def input_paths(values: Any, key: str = "") -> Iterator[tuple[str, str | None]]:
    """Yield the path of each input that a configuration (a tree of JSON values) names, and the split of a dataset."""
    if not isinstance(values, dict) or key in _CHANGING:
        return
    for name in (*_INPUTS, *(("model",) if key == "reward" else ())):
        if isinstance(values.get(name), str) and "\0" not in values[name]:
            yield values[name], values.get("split")
    for name, value in values.items():
        yield from input_paths(value, name)


def file_digests(path: str, split: str | None = None) -> dict[str, str]:
    """Return size and digest of each file of a checkpoint or a dataset, by name; empty if there is no file.

    A digest reads at most `SAMPLED_BYTES` of a folder, so a difference between its chunks is not found.

    Args:
        path: a file, a glob pattern, or a folder. In a checkpoint folder, only files that archon reads are compared.
        split: split of a dataset. In a folder and its direct subfolders, only files with the split in their name are
            compared.
    """
    folder = Path(path)
    if not folder.is_dir():
        files = [path] if folder.exists() else sorted(glob.glob(path, recursive=True))
        return _digests(Path(), files[:MAX_FILES])
    patterns = WEIGHT_FILES if split is None else ("*", "*/*")
    found = {file for pattern in patterns for file in folder.glob(pattern) if not file.name.startswith(".")}
    names = [str(file.relative_to(folder)) for file in found if (split or "").lower() in file.name.lower()]
    return {f"{path}/{file}": text for file, text in _digests(folder, sorted(names)[:MAX_FILES]).items()}


def _texts(values: Any) -> Iterator[str]:
    """Yield the strings in a tree of JSON values."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, dict | list):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _texts(value)


def _digests(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return size and sampled digest of the regular files among `names`, by name."""
    found = []
    for name in names:
        state = os.stat(folder / name)
        if stat.S_ISREG(state.st_mode):
            found.append((name, state.st_size, state.st_mtime_ns))
    return _read_digests(str(folder.absolute()), tuple(found))


@functools.lru_cache(maxsize=32)  # several models of a run share a checkpoint
def _read_digests(folder: str, files: tuple[tuple[str, int, int], ...]) -> dict[str, str]:
    digests, remaining = {}, SAMPLED_BYTES
    for index, (name, size, _) in enumerate(sorted(files, key=lambda file: file[1])):
        share = remaining // (len(files) - index)
        remaining -= min(share, size)
        digests[name] = f"{size:,} bytes (digest {_sampled_digest(os.path.join(folder, name), size, share)})"
    return {name: digests[name] for name, *_ in files}


def _sampled_digest(file: str, size: int, share: int) -> str:
    """Return the digest of a file, or of `share` bytes of it in evenly spaced chunks, the first and last included."""
    digest = hashlib.blake2b(digest_size=8)
    count = 1 if size <= share else max(2, share // CHUNK_BYTES)
    length = min(size, share) // count
    with open(file, "rb") as opened:
        for index in range(count):
            opened.seek((size - length) * index // max(1, count - 1))
            digest.update(opened.read(length))
    return digest.hexdigest()
