"""Delta weight pushes: the changed elements of a checkpoint, bit for bit."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from archon.remote.delta import DELTA_FILE, write_delta


def save(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_delta_has_every_element_whose_bits_changed(tmp_path: Path) -> None:
    """Also a zero whose sign changed; a NaN that stayed has not changed."""
    old = torch.zeros(4, 25)
    old[0, :3] = torch.tensor([1.0, float("nan"), 2.0])
    new = old.clone()
    new[0, 0], new[3, 24], new[2, 1] = 1.5, -1.0, -0.0
    before = save(tmp_path / "old", {"w": old, "same": torch.ones(7)})
    after = save(tmp_path / "new", {"w": new, "same": torch.ones(7)})
    assert write_delta(before, after, tmp_path / "delta")
    parts = load_file(tmp_path / "delta" / DELTA_FILE)
    assert parts["w.indices"].tolist() == [0, 51, 99] and parts["same.indices"].numel() == 0
    patched = old.flatten()
    patched[parts["w.indices"].long()] = parts["w.values"]
    assert patched.view(torch.int32).equal(new.flatten().view(torch.int32))


def test_delta_of_another_checkpoint_is_not_written(tmp_path: Path) -> None:
    before = save(tmp_path / "old", {"w": torch.zeros(64)})
    others = {
        "dtype": {"w": torch.zeros(64, dtype=torch.int32)},
        "shape": {"w": torch.zeros(8, 8)},
        "name": {"v": torch.zeros(64)},
        "more": {"w": torch.zeros(64), "v": torch.zeros(1)},
    }
    for name, tensors in others.items():
        assert not write_delta(before, save(tmp_path / name, tensors), tmp_path / "delta"), name
    assert not write_delta(tmp_path / "absent", before, tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


def test_delta_larger_than_half_a_checkpoint_is_not_written(tmp_path: Path) -> None:
    """An index takes as many bytes as a value in float32, so a quarter of the elements is the limit."""
    before = save(tmp_path / "old", {"w": torch.zeros(4000)})
    for changed, written in ((900, True), (1200, False)):
        tensor = torch.zeros(4000)
        tensor[:changed] = 1.0
        after = save(tmp_path / f"{changed}", {"w": tensor})
        assert write_delta(before, after, tmp_path / f"delta-{changed}") == written
