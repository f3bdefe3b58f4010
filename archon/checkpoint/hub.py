"""Models and datasets of the Hugging Face hub by id, from the hub or from its cache on disk."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Literal, NamedTuple

from archon.checkpoint.other_folders import advice
from archon.schema.errors import CheckpointError, DatasetError

RepoType = Literal["model", "dataset"]

_ID = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
CONFIG_FILE = "config.json"
CONFIG_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
"""Config, tokenizer and chat template of a model."""
WEIGHT_FILES = (*CONFIG_FILES, "*.safetensors")
_UNUSED_FILES = ("*/*.safetensors", "consolidated*.safetensors")  # copies of the weights in other formats
_ERRORS: dict[RepoType, type[CheckpointError | DatasetError]] = {"model": CheckpointError, "dataset": DatasetError}


class HubId(NamedTuple):
    """A repository of the hub, and a branch, tag or commit of it (None: `main`)."""

    name: str
    revision: str | None


def parse_hub_id(path: str | os.PathLike[str]) -> HubId | None:
    """Return the hub id that `owner/name` or `owner/name@revision` stands for; None for any other path."""
    match = _ID.fullmatch(os.fspath(path))
    return None if match is None else HubId(match["name"], match["revision"])


@functools.cache
def hub_snapshot(
    hub_id: HubId, repo_type: RepoType, patterns: tuple[str, ...] | None = None, *, offline: bool = False
) -> Path:
    """Return the folder of a repository in the hub's cache, after downloading the files that it lacks.

    The environment variables of huggingface_hub apply: HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE.

    Args:
        hub_id: the repository.
        repo_type: its type.
        patterns: names of the files to download, such as `*.json`; None for all.
        offline: use only the cache, as with HF_HUB_OFFLINE=1.

    Raises:
        CheckpointError: the model is neither in the cache nor on a hub that can be reached.
        DatasetError: the same for a dataset.
    """
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            hub_id.name,
            repo_type=repo_type,
            revision=hub_id.revision,
            allow_patterns=None if patterns is None else [*patterns],
            ignore_patterns=None if patterns is None else [*_UNUSED_FILES],
            local_files_only=offline,
        )
    except Exception as error:  # of huggingface_hub, or of its HTTP library, which depends on its release
        raise _ERRORS[repo_type](_not_available(hub_id, repo_type, error)) from error
    return Path(folder)


def model_folder(path: str | os.PathLike[str], patterns: tuple[str, ...] = WEIGHT_FILES) -> Path:
    """Return the folder of a model, which is a path or a hub id; a path that exists wins.

    Raises:
        CheckpointError: `path` is a hub id, and that model is not available; see `hub_snapshot`.
    """
    hub_id = None if Path(path).exists() else parse_hub_id(path)
    return Path(path) if hub_id is None else hub_snapshot(hub_id, "model", patterns)


def checkpoint_folder(path: str | os.PathLike[str], patterns: tuple[str, ...] = WEIGHT_FILES) -> Path:
    """Return the folder of a checkpoint, given as a path or a hub id (`model_folder`).

    Raises:
        CheckpointError: it is neither an existing folder nor a model on the hub or in its cache.
    """
    folder = model_folder(path, patterns)
    if not folder.exists():
        raise CheckpointError(
            f"{folder}: it does not exist; expected the folder of a checkpoint, or a hub id such as Qwen/Qwen3-0.6B"
        )
    if not folder.is_dir():
        hint = "; archon reads safetensors, not GGUF" if folder.suffix == ".gguf" else ""
        raise CheckpointError(f"{folder}: it is a file; expected the folder of a checkpoint{hint}")
    return folder


def config_file(path: str | os.PathLike[str]) -> Path:
    """Return the `config.json` of a checkpoint folder or a hub id, without importing PyTorch.

    Raises:
        CheckpointError: the folder is missing or not a checkpoint; the error describes its content.
    """
    folder = checkpoint_folder(path, CONFIG_FILES)
    file = folder / CONFIG_FILE
    if not os.path.lexists(file):
        raise CheckpointError(
            f"{folder}: it is not a Hugging Face checkpoint: it holds no {CONFIG_FILE}; {advice(folder)}"
        )
    return file


def is_reachable(hub_id: HubId, repo_type: RepoType) -> bool:
    """Return whether the hub answers a request for a repository, even if only with an error."""
    import huggingface_hub

    try:
        huggingface_hub.HfApi().repo_info(hub_id.name, repo_type=repo_type, revision=hub_id.revision, timeout=10)
    except Exception as error:  # noqa: BLE001 - of huggingface_hub, or of its HTTP library, which depends on its release
        return isinstance(error, huggingface_hub.errors.HfHubHTTPError)
    return True


def _not_available(hub_id: HubId, repo_type: RepoType, error: Exception) -> str:
    from huggingface_hub import constants, errors

    revision = "" if hub_id.revision is None else f" --revision {hub_id.revision}"
    kind = "" if repo_type == "model" else f" --repo-type {repo_type}"
    is_offline = isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled)
    reason = "it is offline or was not reached" if is_offline else " ".join(str(error).split())[:200]
    return (
        f"{hub_id.name}: no such folder, and no such {repo_type} in the hub's cache {constants.HF_HUB_CACHE} or at "
        f"{constants.ENDPOINT} ({reason}); on a machine that reaches the hub run: hf download {hub_id.name}{revision}"
        f"{kind} --local-dir FOLDER, and set the path to FOLDER here"
    )
