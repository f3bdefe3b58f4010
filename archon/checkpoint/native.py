"""Native checkpoint format: the full training state without pickle; a run resumes bitwise.

    root/step-00000010/tensors*.safetensors  every tensor of the state (`archon.checkpoint.state_file`)
                       index.json            files of each tensor's regions, if several processes saved
                       state.json            all other values, with names in place of the tensors
                       manifest.json         step, fingerprint of the model, size and SHA-256 of the files
    root/latest                              the name of the newest checkpoint

With several processes, saving and loading are collectives. All ranks write one checkpoint together on a shared file
system. Each rank reads the regions it needs, also from a checkpoint of another layout.

A checkpoint is written under a hidden name, synced and renamed; then `latest` is replaced. After a kill at any moment
each `step-*` folder is complete, and `latest` names one of them. Saving a step again creates a new folder
(`step-00000010.1`) and removes the earlier one after updating `latest`.
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
    hide,
    kill_point,
    remove_leftovers,
    replace_file,
    staged_folder,
    sync,
    write_errors,
    write_json,
    write_synced,
)
from archon.checkpoint.safetensors_file import LazyTensor, fail
from archon.checkpoint.state_file import (
    INDEX_FILE,
    assign_shards,
    build_index,
    check_files,
    open_tensors,
    write_shards,
)
from archon.checkpoint.state_tree import Encoder, decode, merge_ranks, read_all
from archon.models.args.base import BaseModelArgs
from archon.parallel.control_plane import ControlPlane
from archon.schema.errors import CheckpointError, describe_error

# Format numbers in the manifest: written by one process, and by several.
FORMATS = (1, 2)
LATEST_FILE = "latest"
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
_NAME = re.compile(r"step-(\d{8,18})(?:\.(\d{1,9}))?")


def model_fingerprint(args: BaseModelArgs) -> dict[str, Any]:
    """Return the family and arguments of a model; loading a checkpoint requires equal ones.

    The backends of attention and delta nets are excluded: training may resume with others.
    """
    fields = {name: value for name, value in asdict(args).items() if name not in ("attn_type", "delta_rule")}
    if not args.n_mtp_layers:  # as in checkpoints of earlier versions
        del fields["n_mtp_layers"]
    return json.loads(json.dumps({"family": type(args).__name__, **fields}))


def save_state(
    root: str | os.PathLike[str],
    step: int,
    state: Mapping[str, Any],
    keep: int | None = None,
    fingerprint: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint of `step`, make it the latest, and return its folder.

    Args:
        root: folder of the run's checkpoints; created if missing.
        step: training step, at least 0.
        state: nested dictionaries, lists and tuples of tensors, numbers, strings, booleans and None. Floats are
            restored bit for bit, integers at any size. Tensors may be on any device and are only read. With several
            ranks, each passes its shards (`state_tree.Shard`); plain values are taken from rank 0.
        keep: number of checkpoints to keep, including this one; None keeps all.
        fingerprint: `model_fingerprint` of the model, compared on load.

    Raises:
        CheckpointError: `root` cannot be written. Errors are raised on every rank.
        TypeError: a value cannot be stored.
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
    """Encode the state for `save_state` and return a function that writes it.

    With `snapshot`, this rank's shards are copied to the CPU. Training may then continue while the returned function
    runs in any thread.
    """
    if step < 0 or (keep is not None and keep < 1):
        raise CheckpointError(f"{root}: expected step of at least 0 and keep of at least 1, got {step=}, {keep=}")
    plane = ControlPlane.with_long_timeout("saves")
    encoder = Encoder(plane.rank)
    tree = json.dumps(plane.run_on_all(lambda: encoder.encode(state)), allow_nan=False)
    shards = assign_shards(encoder.shards, plane)
    if snapshot:
        shards = {name: replace(shard, data=_copy_to_cpu(shard.data)) for name, shard in shards.items()}
    local_paths = {name: encoder.paths[name] for name in shards if name in encoder.paths}
    per_rank = json.dumps(encoder.per_rank, allow_nan=False)
    target = Path(root)

    def write() -> Path:
        kill_point("save.begin")
        with ExitStack() as stack:

            def stage() -> str:
                with write_errors(target):
                    target.mkdir(parents=True, exist_ok=True)
                    remove_leftovers(target)
                    return stack.enter_context(staged_folder(target / _unused_folder_name(target, step))).name

            def write_local_shards() -> dict[str, Any]:
                with write_errors(folder):
                    return write_shards(folder, shards, plane)

            def publish() -> str:
                with write_errors(target):
                    paths = {name: tuple(path) for entry in written for name, path in entry["paths"].items()}
                    values = [entry["per_rank"] for entry in written]
                    text = json.dumps(merge_ranks(json.loads(tree), paths, values))
                    return _publish(folder, step, text, written, keep, fingerprint, plane.size)

            staged = plane.run_on_all(stage if plane.is_main else str)
            folder = target / plane.broadcast_json(lambda: staged)
            kill_point("save.staged")
            local = plane.run_on_all(write_local_shards)
            kill_point("save.tensors_written")
            local |= {"paths": local_paths, "per_rank": json.loads(per_rank)}
            written = [json.loads(text) for text in plane.gather(json.dumps(local).encode())]
            kill_point("save.all_written")
            published = plane.run_on_all(publish if plane.is_main else str)
            name = plane.broadcast_json(lambda: published)
        kill_point("save.end")
        return target / name

    return write


def _copy_to_cpu(data: Tensor | LazyTensor) -> Tensor:
    return data.read() if isinstance(data, LazyTensor) else data.detach().to("cpu", copy=True)


def _publish(
    folder: Path,
    step: int,
    text: str,
    written: list[dict[str, Any]],
    keep: int | None,
    fingerprint: Mapping[str, Any] | None,
    ranks: int,
) -> str:
    """Write rank 0's files to the staged folder, rename it, update `latest` and return the folder's name."""
    digests = {entry["file"]: entry["sha256"] for entry in written if entry["file"]}
    index = build_index(written)
    if ranks > 1:
        digests[INDEX_FILE] = _write_text(folder / INDEX_FILE, json.dumps(index))
    digests[STATE_FILE] = _write_text(folder / STATE_FILE, text)
    content = {
        "format": FORMATS[ranks > 1],
        "archon": archon.__version__,
        "step": step,
        "fingerprint": None if fingerprint is None else dict(fingerprint),
        "files": {
            name: {"bytes": (folder / name).stat().st_size, "sha256": digest} for name, digest in digests.items()
        },
    }
    write_json(folder / MANIFEST_FILE, {"content": content, "sha256": _content_digest(content)})
    kill_point("save.manifest_written")
    sync(folder)
    root = folder.parent
    target = root / _unused_folder_name(root, step)
    folder.rename(target)
    sync(root)
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
    """Load (step, state) of the checkpoint that `latest` names; None if nothing was saved.

    If the first save was killed before writing `latest`, the checkpoint of the highest step is loaded. See `load_state`
    for errors.
    """
    folder = broadcast_latest_checkpoint(root)
    return None if folder is None else load_state(folder, fingerprint)


def broadcast_latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """Return rank 0's result of `latest_checkpoint` on every rank. A collective."""
    plane = ControlPlane.with_long_timeout("loads")
    folder = plane.run_on_all(lambda: latest_checkpoint(root) if plane.rank == 0 else None)
    name = plane.broadcast_json(lambda: "" if folder is None else folder.name)
    return Path(root) / name if name else None


def latest_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """Return the folder that `load_latest` loads; None if nothing was saved."""
    root = Path(root)
    pointer = root / LATEST_FILE
    if not pointer.is_file():
        folders = _checkpoints(root)
        return folders[-1] if folders else None
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    if not _NAME.fullmatch(name):
        fail(pointer, f"invalid name {name[:80]!r}; expected a checkpoint, for example step-00000010")
    if not (root / name).is_dir():
        fail(pointer, f"it names {name}, which does not exist in {root}; write the name of a checkpoint there into it")
    return root / name


def find_checkpoint(path: str | os.PathLike[str]) -> Path | None:
    """Return `path` if it is a native checkpoint, else the latest checkpoint inside it, else None."""
    return Path(path) if (Path(path) / MANIFEST_FILE).is_file() else broadcast_latest_checkpoint(path)


def load_state(
    path: str | os.PathLike[str], fingerprint: Mapping[str, Any] | None = None
) -> tuple[int, dict[str, Any]]:
    """Load (step, state) of one checkpoint folder, with full tensors on the CPU.

    Raises:
        CheckpointError: a file is missing, truncated or altered, or the saved fingerprint differs from `fingerprint`.
    """
    with open_state(path, fingerprint) as (step, state):
        return step, read_all(state)


@contextmanager
def open_state(
    path: str | os.PathLike[str], fingerprint: Mapping[str, Any] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (step, state) like `load_state`, with `LazyTensor`s that can be read within the block.

    The ranks share the work of checking every file's SHA-256 first.
    """
    folder, plane = Path(path), ControlPlane.with_long_timeout("loads")

    def load_valid_manifest() -> dict[str, Any]:
        manifest = read_manifest(folder)
        if fingerprint is not None:
            _require_same_model(folder, manifest["fingerprint"], fingerprint)
        check_files(folder, manifest["files"], MANIFEST_FILE, plane.rank, plane.size)
        return manifest

    manifest = plane.run_on_all(load_valid_manifest)
    with ExitStack() as stack:
        opened = open_tensors(folder, {*manifest["files"]})
        tensors = plane.run_on_all(lambda: stack.enter_context(opened))
        try:
            state = decode(json.loads((folder / STATE_FILE).read_bytes()), tensors)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError) as error:
            reason = describe_error(error)
            fail(folder / STATE_FILE, f"it is not the state of a checkpoint ({reason}); copy the folder again")
        yield manifest["step"], state


def _content_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's manifest; CheckpointError if missing, damaged or of an unknown format."""
    file = folder / MANIFEST_FILE
    if not file.is_file():
        fail(folder, f"it is not a checkpoint to resume from: it holds no {MANIFEST_FILE}")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        content = manifest["content"]
        intact = _content_digest(content) == manifest["sha256"] and manifest.keys() == {"content", "sha256"}
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        fail(file, "it is damaged or was altered: its checksum does not match")
    if not isinstance(content, dict) or "format" not in content:
        fail(file, "it has no format; expected the manifest of a checkpoint")
    if content["format"] not in FORMATS:
        fail(file, f"its format is {content['format']!r}; this version of archon reads formats {FORMATS}")
    if not _describes_checkpoint(content):
        fail(file, "it does not describe a checkpoint: expected a step, and files with their bytes and sha256")
    return content


def _describes_checkpoint(content: Mapping[str, Any]) -> bool:
    files, fingerprint = content.get("files"), content.get("fingerprint")
    if type(content.get("step")) is not int or not isinstance(fingerprint, dict | None) or not isinstance(files, dict):
        return False
    return all(
        name == os.path.basename(name)
        and isinstance(entry, dict)
        and type(entry.get("bytes")) is int
        and isinstance(entry.get("sha256"), str)
        for name, entry in files.items()
    )


def _require_same_model(folder: Path, saved: Mapping[str, Any] | None, fingerprint: Mapping[str, Any]) -> None:
    for name, before, now in _differences(saved or {}, fingerprint):
        difference = f"{name} is {before!r} there and {now!r} here"
        advice = "resume with the model that wrote it, or choose another run directory"
        if name == "base":
            difference = f"its LoRAs were trained on another base: digest {before} there, {now} here"
            advice = "set path to the checkpoint that they were trained on, or choose another run directory"
        elif name == "adapters":
            with_lora, full = ("there", "here") if before else ("here", "there")
            difference = f"LoRAs are trained {with_lora} and all weights {full}"
            advice = f"{'set lora as it was' if before else 'set lora to null'}, or choose another run directory"
        fail(folder, f"it was written by another model: {difference}; {advice}")


def _differences(saved: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted name, saved value, current value) of every difference; None for a missing value.

    An argument that is off and that the saved model does not have is no difference: archon added it later.
    """
    for name in [*fingerprint, *(name for name in saved if name not in fingerprint)]:
        before, now = saved.get(name), fingerprint.get(name)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from ((f"{name}.{part}", *values) for part, *values in _differences(before, now))
        elif before != now and (name in saved or now):
            yield name, before, now


def _parse_folder_name(folder: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


def _checkpoints(root: Path) -> list[Path]:
    """Return the checkpoint folders in `root`, ordered by step."""
    if not root.is_dir():
        return []
    return sorted((f for f in root.iterdir() if _NAME.fullmatch(f.name) and f.is_dir()), key=_parse_folder_name)


def _unused_folder_name(root: Path, step: int) -> str:
    repeats = [_parse_folder_name(folder)[1] for folder in _checkpoints(root) if _parse_folder_name(folder)[0] == step]
    return f"step-{step:08d}" + (f".{max(repeats) + 1}" if repeats else "")


def _prune(root: Path, newest: Path, keep: int | None) -> None:
    """Remove earlier saves of the step of `newest`, and all but the last `keep` checkpoints; never `newest`."""
    older = [folder for folder in _checkpoints(root) if folder != newest]
    replaced = [folder for folder in older if _parse_folder_name(folder)[0] == _parse_folder_name(newest)[0]]
    older = [folder for folder in older if folder not in replaced]
    surplus = [] if keep is None else older[: max(0, len(older) - (keep - 1))]
    for folder in replaced + surplus:
        hidden = hide(folder)
        kill_point("save.old_hidden")
        shutil.rmtree(hidden)
