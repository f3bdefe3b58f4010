"""Full-state checkpoints: everything a run needs to go on bitwise as if it had not stopped. No pickle.

    root/step-00000010/tensors*.safetensors  every tensor of the state (`archon.checkpoint.state_file`)
                       index.json            where the parts of each lie, if several processes wrote it
                       state.json            everything else, with names where the tensors stood
                       manifest.json         step, fingerprint of the model, size and SHA-256 of the files
    root/latest                              the name of the newest checkpoint

Where several processes run, saving and loading are collectives: all ranks write one checkpoint together, on a file
system they share, and each reads what it needs of it, in whatever layout it was written.

A checkpoint is written under a hidden name, synced and renamed; then `latest` is replaced. So whatever moment a process
is killed at, each `step-*` folder is whole, and `latest` names one of them. A step that is saved again gets a folder of
its own (`step-00000010.1`) and the earlier one is removed after `latest` has moved on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

import archon
from archon.checkpoint.atomic import (
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
from archon.checkpoint.safetensors_file import Deferred, refuse
from archon.checkpoint.state_file import (
    INDEX_FILE,
    StateFiles,
    build_index,
    file_digest,
    own_share,
    read_whole,
    write_share,
)
from archon.checkpoint.state_tree import Encoder, assemble, decode
from archon.models.args import BaseModelArgs
from archon.parallel.control_plane import ControlPlane
from archon.schema.errors import CheckpointError

__all__ = [
    "KILL_POINTS",
    "kill_point",
    "load_latest",
    "load_state",
    "model_fingerprint",
    "opened_state",
    "prepare_save",
    "save_state",
]

# Of one process, and of several.
FORMATS = (1, 2)
LATEST_FILE = "latest"
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
            bit for bit, integers at any size. Tensors may be live ones of any device; they are only read. Of several
            ranks, each gives the parts it holds (`state_tree.Part`); plain values are rank 0's.
        keep: how many checkpoints to leave, this one included; None leaves all.
        fingerprint: of the model (`model_fingerprint`), to be compared by whoever loads it.

    Raises CheckpointError where `root` cannot be written, TypeError for a value that cannot be stored; on every rank
    where it happens on one.
    """
    return prepare_save(root, step, state, keep, fingerprint)()


def prepare_save(
    root: str | os.PathLike[str],
    step: int,
    state: Mapping[str, Any],
    keep: int | None = None,
    fingerprint: Mapping[str, Any] | None = None,
    *,
    snapshot: bool = False,
) -> Callable[[], Path]:
    """The first half of `save_state`, which looks at the state; what it gives back is the second, which writes.

    With `snapshot` what this rank will write is copied to the CPU, so that the training may go on before the second
    half, and the second half may run in another thread.
    """
    if step < 0 or (keep is not None and keep < 1):
        raise CheckpointError(f"{root}: step must be at least 0 and keep at least 1, got step={step}, keep={keep}")
    plane = ControlPlane.patient("saves")
    encoder = Encoder(plane.rank)
    tree = json.dumps(plane.run_on_all(lambda: encoder.encode(state)), allow_nan=False)
    share = own_share(encoder.parts, plane)
    if snapshot:
        share = {name: replace(part, data=_copy(part.data)) for name, part in share.items()}
    paths = {name: encoder.paths[name] for name in share if name in encoder.paths}
    own = json.dumps(encoder.own, allow_nan=False)
    target = Path(root)

    def write() -> Path:
        kill_point("save.begin")
        with ExitStack() as stack:

            def stage() -> Path:
                with writing(target):
                    target.mkdir(parents=True, exist_ok=True)
                    remove_leftovers(target)
                    return stack.enter_context(staged_folder(target / _free_name(target, step)))

            def write_own() -> dict[str, Any]:
                with writing(folder):
                    return write_share(folder, share, plane)

            def publish() -> str:
                with writing(target):
                    text = json.dumps(assemble(json.loads(tree), _paths(written), [w["own"] for w in written]))
                    return _publish(folder, step, text, written, keep, fingerprint, plane.size)

            first = plane.rank == 0
            folder = plane.run_on_all(stage if first else lambda: target)
            folder = target / plane.broadcast_json(lambda: folder.name)
            kill_point("save.staged")
            mine = plane.run_on_all(write_own)
            kill_point("save.tensors_written")
            mine |= {"paths": paths, "own": json.loads(own)}
            written = [json.loads(text) for text in plane.gather(json.dumps(mine).encode())]
            kill_point("save.all_written")
            name = plane.run_on_all(publish if first else str)
            name = plane.broadcast_json(lambda: name)
        kill_point("save.end")
        return target / name

    return write


def _copy(data: Tensor | Deferred) -> Tensor:
    return data.make() if isinstance(data, Deferred) else data.detach().to("cpu", copy=True)


def _paths(written: list[dict[str, Any]]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(path) for entry in written for name, path in entry["paths"].items()}


def _publish(
    folder: Path,
    step: int,
    text: str,
    written: list[dict[str, Any]],
    keep: int | None,
    fingerprint: Mapping[str, Any] | None,
    ranks: int,
) -> str:
    """Complete the staged folder by what rank 0 writes, rename it and point `latest` to it; gives back its name."""
    digests = {entry["file"]: entry["sha256"] for entry in written if entry["file"]}
    index = build_index(written)
    if ranks > 1:
        digests[INDEX_FILE] = _write_text(folder / INDEX_FILE, json.dumps(index))
    digests[STATE_FILE] = _write_text(folder / STATE_FILE, text)
    _write_manifest(folder, step, digests, fingerprint, FORMATS[ranks > 1])
    kill_point("save.manifest_written")
    sync_folder(folder)
    root = folder.parent
    target = root / _free_name(root, step)
    folder.rename(target)
    sync_folder(root)
    kill_point("save.renamed")
    replace_file(root / LATEST_FILE, target.name + "\n", "save.latest_written")
    kill_point("save.latest_renamed")
    _prune(root, target, keep)
    return target.name


def _write_text(path: Path, text: str) -> str:
    write_synced(path, text)
    return hashlib.sha256(text.encode()).hexdigest()


def load_latest(
    root: str | os.PathLike[str], fingerprint: Mapping[str, Any] | None = None
) -> tuple[int, dict[str, Any]] | None:
    """(step, state) of the checkpoint that `latest` names; None where nothing has been saved.

    Where there is no `latest` (the first save was killed just before writing it), it is the newest by step. See
    `load_state` for errors.
    """
    folder = agreed_latest(root)
    return None if folder is None else load_state(folder, fingerprint)


def agreed_latest(root: str | os.PathLike[str]) -> Path | None:
    """What rank 0 finds by `latest_checkpoint`, on every rank."""
    plane = ControlPlane.patient("loads")
    found = plane.run_on_all(lambda: latest_checkpoint(root) if plane.rank == 0 else None)
    name = plane.broadcast_json(lambda: "" if found is None else found.name)
    return Path(root) / name if name else None


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


def state_folder(path: str | os.PathLike[str]) -> Path | None:
    """The checkpoint at `path`: it, or the newest beneath it; None where it is another kind of folder."""
    return Path(path) if (Path(path) / MANIFEST_FILE).is_file() else agreed_latest(path)


def load_state(
    path: str | os.PathLike[str], fingerprint: Mapping[str, Any] | None = None
) -> tuple[int, dict[str, Any]]:
    """(step, state) of one checkpoint folder, with whole tensors on the CPU.

    Raises CheckpointError naming the file where one is missing, truncated or altered, and naming the difference where
    `fingerprint` is given and the checkpoint was written by another model.
    """
    with opened_state(path, fingerprint) as (step, state):
        return step, read_whole(state)


@contextmanager
def opened_state(
    path: str | os.PathLike[str], fingerprint: Mapping[str, Any] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """As `load_state`, with `StoredTensor`s that are read, part by part, within the block. Every file is checked first,
    each by one rank."""
    folder, plane = Path(path), ControlPlane.patient("loads")
    manifest = plane.run_on_all(lambda: _checked_manifest(folder, fingerprint, plane))
    files = plane.run_on_all(lambda: StateFiles(folder, {*manifest["files"]}))
    try:
        yield manifest["step"], decode(json.loads((folder / STATE_FILE).read_bytes()), files.tensors)
    finally:
        files.close()


def _checked_manifest(folder: Path, fingerprint: Mapping[str, Any] | None, plane: ControlPlane) -> dict[str, Any]:
    manifest = read_manifest(folder)
    if fingerprint is not None:
        _require_same_model(folder, manifest["fingerprint"], fingerprint)
    for name, entry in manifest["files"].items():
        file = folder / name
        if not file.is_file():
            refuse(file, "it is missing")
        if file.stat().st_size != entry["bytes"]:
            refuse(file, f"it has {file.stat().st_size} bytes, {MANIFEST_FILE} says {entry['bytes']}; truncated?")
    for name in sorted(manifest["files"])[plane.rank :: plane.size]:
        if file_digest(folder / name) != manifest["files"][name]["sha256"]:
            refuse(folder / name, f"it was altered: its SHA-256 is not the one in {MANIFEST_FILE}")
    return manifest


def _write_manifest(
    folder: Path, step: int, digests: Mapping[str, str], fingerprint: Mapping[str, Any] | None, format: int
) -> None:
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": digest} for name, digest in digests.items()}
    content = {
        "format": format,
        "archon": archon.__version__,
        "step": step,
        "fingerprint": None if fingerprint is None else dict(fingerprint),
        "files": files,
    }
    write_json(folder / MANIFEST_FILE, {"content": content, "sha256": _content_digest(content)})


def _content_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a checkpoint's manifest says; CheckpointError where it is missing, damaged or of another format."""
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
    if content["format"] not in FORMATS:
        refuse(file, f"its format is {content['format']!r}; this archon reads formats {FORMATS}")
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
