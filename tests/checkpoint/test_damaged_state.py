"""Checkpoints with a changed manifest or state and checksums that match: loaded, or refused in one line."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.checkpoint.native import (
    MANIFEST_FILE,
    STATE_FILE,
    _content_digest,
    latest_checkpoint,
    load_state,
    save_state,
)
from archon.schema.errors import CheckpointError

STATE = {"weight": torch.arange(12.0).view(3, 4), "position": {"row": 1, "losses": [1.5, None, "x"]}, "pair": (1, 2)}
VALUES: list[Any] = [
    None,
    1,
    -1,
    10**30,
    1.5,
    True,
    "x",
    "../../etc/passwd",
    "/dev/zero",
    "a\0b",
    [],
    {},
    [1],
    {"a": 1},
]
VALUES += [{"$tensor": "none"}, {"$tensor": []}, {"$float": "x"}, {"$tuple": 3}, {"$dict": [1]}, {"$ranks": 1}]


def places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(found for key, item in inner for found in places(item, (*place, key)))]


def changed(value: Any, random_: random.Random) -> Any:
    """Return a copy with one value replaced, removed or renamed."""
    value = copy.deepcopy(value)
    *path, last = random_.choice([place for place in places(value) if place])
    holder = value
    for key in path:
        holder = holder[key]
    match random_.randrange(3):
        case 0:
            holder[last] = random_.choice(VALUES)
        case 1:
            del holder[last]
        case 2 if isinstance(holder, dict):
            holder[random_.choice(["other", "../other", "$tensor"])] = holder.pop(last)
        case 2:
            holder.append(holder[0])
    return value


def check_changes(root: Path, n: int, seed: int) -> None:
    save_state(root, 1, STATE)
    folder, random_, n_refused = latest_checkpoint(root), random.Random(seed), 0
    manifest, state = (json.loads((folder / name).read_text()) for name in (MANIFEST_FILE, STATE_FILE))
    for number in range(n):
        content, text = copy.deepcopy(manifest["content"]), json.dumps(state).encode()
        if number % 2:
            content = changed(content, random_)
        else:
            text = json.dumps(changed(state, random_)).encode()
            content["files"][STATE_FILE] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
        (folder / STATE_FILE).write_bytes(text)
        (folder / MANIFEST_FILE).write_text(json.dumps({"content": content, "sha256": _content_digest(content)}))
        try:
            load_state(folder)
        except CheckpointError as error:
            message = str(error)
            n_refused += 1
        else:
            message = ""
        assert "\n" not in message and len(message) < 600
    assert n_refused > n // 4


def test_a_changed_checkpoint_is_loaded_or_refused_in_one_line(tmp_path):
    check_changes(tmp_path, n=150, seed=0)


@pytest.mark.slow
def test_thousands_of_changed_checkpoints_are_loaded_or_refused_in_one_line(tmp_path):
    check_changes(tmp_path, n=5000, seed=1)
