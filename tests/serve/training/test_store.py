"""The state folder of the training service after a kill."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("tinker")

from archon.serve.training.store import Checkpoint, Store

SAVED = Checkpoint("tinker://m:train:0/weights/a", "m:train:0", "me", "weights", "a", {}, None, 1.0, None, 1)


def test_a_restart_removes_unfinished_checkpoints_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    kept = [store.folder(SAVED.model, "weights", name) for name in ("a", "b")]
    for name in ("a", "b"):
        store.add_checkpoint(replace(SAVED, name=name, path=f"tinker://m:train:0/weights/{name}"))
    left = [
        store.folder(SAVED.model, "weights", "published"),  # killed before it was recorded
        store.folder(SAVED.model, "sampler_weights", "deleted"),  # killed after it was removed from the record
        kept[0].with_name(".a.partial-0123"),
    ]
    replaced = kept[1].with_name(".b.replaced")  # killed between the two renames of a replacement
    for folder in (kept[0], replaced, *left):
        folder.mkdir(parents=True)
        (folder / "file").write_text(folder.name)
    store.close()
    Store(tmp_path).close()
    assert sorted(path for path in tmp_path.glob("checkpoints/*/*/*")) == sorted(kept)
    assert (kept[1] / "file").read_text() == ".b.replaced"
