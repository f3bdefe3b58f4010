"""Full-state checkpoints: everything a run needs to go on bitwise as if it had not stopped. No pickle.

    root/step-00000010/tensors.safetensors   every tensor of the state
                       state.json            everything else, with names where the tensors stood
                       manifest.json         step, fingerprint of the model, size and SHA-256 of both files
    root/latest                              the name of the newest checkpoint

A checkpoint is written under a hidden name, synced and renamed; then `latest` is replaced. So whatever moment a process
is killed at, each `step-*` folder is whole, and `latest` names one of them. A step that is saved again gets a folder of
its own (`step-00000010.1`) and the earlier one is removed after `latest` has moved on.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import archon
from archon.atomic import (
    KILL_POINTS,
    hide,
    kill_point,
    remove_leftovers,
    replace_file,
    staged_folder,
    sync_folder,
    write_json,
    write_synced,
    writing,
)
from archon.models.args import BaseModelArgs
from archon.safetensors_file import SafetensorsFile, bytes_of, refuse, write_safetensors
from archon.schema.errors import CheckpointError

__all__ = ["KILL_POINTS", "kill_point", "load_latest", "load_state", "model_fingerprint", "save_state"]

FORMAT = 1
LATEST_FILE = "latest"
TENSORS_FILE = "tensors.safetensors"
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
_NAME = re.compile(r"step-(\d{8,18})(?:\.(\d{1,9}))?")


def model_fingerprint(args: BaseModelArgs) -> dict[str, Any]:
    """What must be equal for a checkpoint of one model to belong in another: the family and its sizes and switches.

    The attention backend is left out: any may continue what another began.
    """
    fields = {name: value for name, value in asdict(args).items() if name != "attn_type"}
    return json.loads(json.dumps({"family": type(args).__name__, **fields}))


def save_state(
    root: str | os.PathLike[str],
    step: int,
    state: Mapping[str, Any],
    keep: int | None = None,
    fingerprint: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint of `step` and make it the latest; gives back its folder.

    Args:
        root: folder of the run's checkpoints; made where it is missing.
        step: of the run, at least 0.
        state: nested dictionaries, lists and tuples of tensors, numbers, strings, booleans and None. Floats come back
            bit for bit, integers at any size. Tensors may be live ones of any device; they are only read.
        keep: how many checkpoints to leave, this one included; None leaves all.
        fingerprint: of the model (`model_fingerprint`), to be compared by whoever loads it.

    Raises CheckpointError where `root` cannot be written, TypeError for a value that cannot be stored.
    """
    if step < 0 or (keep is not None and keep < 1):
        raise CheckpointError(f"{root}: step must be at least 0 and keep at least 1, got step={step}, keep={keep}")
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_encode(state, "", tensors), allow_nan=False)
    root = Path(root)
    kill_point("save.begin")
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
        remove_leftovers(root)
        target = root / _free_name(root, step)
        with staged_folder(target) as folder:
            kill_point("save.staged")
            digest = write_safetensors(folder / TENSORS_FILE, tensors, "save.tensor")
            kill_point("save.tensors_written")
            write_synced(folder / STATE_FILE, text)
            digests = {TENSORS_FILE: digest, STATE_FILE: hashlib.sha256(text.encode()).hexdigest()}
            _write_manifest(folder, step, digests, fingerprint)
            kill_point("save.manifest_written")
            sync_folder(folder)
            folder.rename(target)
            sync_folder(root)
        kill_point("save.renamed")
        replace_file(root / LATEST_FILE, target.name + "\n", "save.latest_written")
        kill_point("save.latest_renamed")
        _prune(root, target, keep)
    kill_point("save.end")
    return target


def load_latest(
    root: str | os.PathLike[str], fingerprint: Mapping[str, Any] | None = None
) -> tuple[int, dict[str, Any]] | None:
    """(step, state) of the checkpoint that `latest` names; None where nothing has been saved.

    Where there is no `latest` (the first save was killed just before writing it), it is the newest by step. See
    `load_state` for errors.
    """
    folder = latest_checkpoint(root)
    return None if folder is None else load_state(folder, fingerprint)


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """The folder that `load_latest` would load; None where nothing has been saved."""
    root = Path(root)
    pointer = root / LATEST_FILE
    if not pointer.is_file():
        found = _checkpoints(root)
        return found[-1] if found else None
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    if not _NAME.fullmatch(name):
        refuse(pointer, f"it names {name[:80]!r}; expected a checkpoint such as step-00000010")
    if not (root / name).is_dir():
        refuse(pointer, f"it names {name}, which does not exist in {root}")
    return root / name


def load_state(
    path: str | os.PathLike[str], fingerprint: Mapping[str, Any] | None = None
) -> tuple[int, dict[str, Any]]:
    """(step, state) of one checkpoint folder, with tensors on the CPU.

    Raises CheckpointError naming the file where one is missing, truncated or altered, and naming the difference where
    `fingerprint` is given and the checkpoint was written by another model.
    """
    folder = Path(path)
    manifest = _read_manifest(folder)
    if fingerprint is not None:
        _require_same_model(folder, manifest["fingerprint"], fingerprint)
    for name, entry in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            refuse(file, "it is missing")
        if file.stat().st_size != entry["bytes"]:
            refuse(file, f"it has {file.stat().st_size} bytes, {MANIFEST_FILE} says {entry['bytes']}; truncated?")
    text = (folder / STATE_FILE).read_bytes()
    _require_digest(folder / STATE_FILE, hashlib.sha256(text).hexdigest(), manifest)
    tensors, digest = _read_tensors(folder / TENSORS_FILE)
    _require_digest(folder / TENSORS_FILE, digest, manifest)
    return manifest["step"], _decode(json.loads(text), tensors)


def _write_manifest(folder: Path, step: int, digests: Mapping[str, str], fingerprint: Mapping[str, Any] | None) -> None:
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": digest} for name, digest in digests.items()}
    content = {
        "format": FORMAT,
        "archon": archon.__version__,
        "step": step,
        "fingerprint": None if fingerprint is None else dict(fingerprint),
        "files": files,
    }
    write_json(folder / MANIFEST_FILE, {"content": content, "sha256": _content_digest(content)})


def _content_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST_FILE
    if not file.is_file():
        refuse(folder, f"it is not a checkpoint to resume from: it holds no {MANIFEST_FILE}")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        content = manifest["content"]
        intact = _content_digest(content) == manifest["sha256"] and manifest.keys() == {"content", "sha256"}
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        refuse(file, "it is damaged or was altered: its checksum does not match")
    if content["format"] != FORMAT:
        refuse(file, f"its format is {content['format']!r}; this archon reads format {FORMAT}")
    return content


def _require_same_model(folder: Path, saved: Mapping[str, Any] | None, given: Mapping[str, Any]) -> None:
    for name in [*given, *(saved or {})]:
        before, now = (saved or {}).get(name), given.get(name)
        if before != now:
            refuse(
                folder,
                f"it was written by another model: {name} is {before!r} there and {now!r} here; "
                "resume with the model it was written by, or choose another run directory",
            )


def _require_digest(file: Path, digest: str, manifest: Mapping[str, Any]) -> None:
    if digest != manifest["files"][file.name]["sha256"]:
        refuse(file, f"it was altered: its SHA-256 is not the one in {MANIFEST_FILE}")


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], str]:
    """Every tensor of a file, and the file's SHA-256 over what was read."""
    tensors = {}
    with SafetensorsFile(path) as file:
        digest = hashlib.sha256(len(file.header).to_bytes(8, "little") + file.header)
        for name, entry in file.entries.items():
            tensors[name] = torch.empty(entry.shape, dtype=entry.dtype)
            view = bytes_of(tensors[name])
            file.read_into(view, entry.start, f"key {name!r}")
            digest.update(view)
    return tensors, digest.hexdigest()


def _encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON; tensors go to `tensors` by their path. What JSON lacks becomes an object with one `$` key."""
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Tensor):
        name = where
        while name in tensors:  # {"a": {"b": x}, "a.b": y}
            name += "'"
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, list):
        return [_encode(item, f"{where}.{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"$tuple": _encode([*value], where, tensors)}
    if isinstance(value, Mapping):
        items = {key: _encode(item, f"{where}.{key}" if where else str(key), tensors) for key, item in value.items()}
        if all(isinstance(key, str) and not key.startswith("$") for key in items):
            return items
        return {"$dict": [[_encode(key, where, tensors), item] for key, item in items.items()]}
    raise TypeError(f"state {where!r} is a {type(value).__name__}, which a checkpoint cannot hold without pickle")


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$tensor": name}:
            return tensors[name]
        case {"$float": text}:
            return float(text)
        case {"$tuple": items}:
            return tuple(_decode(items, tensors))
        case {"$dict": pairs}:
            return {_decode(key, tensors): _decode(item, tensors) for key, item in pairs}
    return {key: _decode(item, tensors) for key, item in value.items()}


def _order(folder: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _checkpoints(root: Path) -> list[Path]:
    """The checkpoints in `root`, by step."""
    if not root.is_dir():
        return []
    return sorted((f for f in root.iterdir() if _NAME.fullmatch(f.name) and f.is_dir()), key=_order)


def _free_name(root: Path, step: int) -> str:
    again = [_order(folder)[1] for folder in _checkpoints(root) if _order(folder)[0] == step]
    return f"step-{step:08d}" + (f".{max(again) + 1}" if again else "")


def _prune(root: Path, newest: Path, keep: int | None) -> None:
    """Remove what `newest` replaces, and all but the `keep` last steps; never `newest` itself, whatever its step."""
    others = [folder for folder in _checkpoints(root) if folder != newest]
    replaced = [folder for folder in others if _order(folder)[0] == _order(newest)[0]]
    others = [folder for folder in others if folder not in replaced]
    surplus = [] if keep is None else others[: max(0, len(others) - (keep - 1))]
    for folder in replaced + surplus:
        hidden = hide(folder)
        kill_point("save.old_hidden")
        shutil.rmtree(hidden)
