"""A rank's part of a tensor, read from a file that holds all of it: rows, columns, and parts of many pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from archon.checkpoint.hf_reader import HFCheckpoint, ReadTarget
from archon.checkpoint.safetensors_file import CHUNK_BYTES, COMPARED_BYTES, SafetensorsFile
from archon.checkpoint.tensor_reader import read_region

# Several pieces of whole rows, with a remainder; and rows that are wider than a piece.
SHAPES = [(1200, 700), (3, CHUNK_BYTES // 4 + 3)]
COLUMNS, ROWS, BOTH = (0.0, 1.0, 0.37, 0.74), (0.37, 0.74, 0.0, 1.0), (0.2, 0.9, 0.37, 0.74)


def part_of(shape: tuple[int, int], shares: tuple[float, ...]) -> tuple[slice, slice]:
    """Rows and columns between these shares of the whole."""
    rows, columns = shape
    first, stop, left, right = shares
    return slice(int(rows * first), round(rows * stop)), slice(int(columns * left), round(columns * right))


def write(folder: Path, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A matrix behind another one, no two elements of a row or column alike."""
    whole = torch.randn(shape).to(dtype)
    save_file({"before": torch.ones(5, 3, dtype=dtype), "matrix": whole}, folder / "model.safetensors")
    return whole


@pytest.mark.parametrize("shape", SHAPES, ids=["many rows", "wide rows"])
@pytest.mark.parametrize("shares", [COLUMNS, ROWS, BOTH], ids=["columns", "rows", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_part_of_a_matrix_larger_than_a_piece_is_read_into_place(
    tmp_path: Path, shape: tuple[int, int], shares: tuple[float, ...], dtype: torch.dtype
) -> None:
    whole, part = write(tmp_path, shape, torch.float32), part_of(shape, shares)
    assert whole[part].nbytes > 0 and whole.nbytes > 2 * CHUNK_BYTES
    target = torch.full(whole[part].shape, torch.nan, dtype=dtype)
    lying = torch.full(whole[part].shape[::-1], torch.nan, dtype=dtype).t()
    with HFCheckpoint(tmp_path) as checkpoint:
        checkpoint.read([ReadTarget("matrix", target, part), ReadTarget("matrix", lying, part)])
    assert torch.equal(target, whole[part].to(dtype))
    assert torch.equal(lying, target)


@pytest.mark.parametrize("shape", SHAPES, ids=["many rows", "wide rows"])
@pytest.mark.parametrize("shares", [COLUMNS, ROWS, BOTH], ids=["columns", "rows", "both"])
def test_a_box_of_a_state_larger_than_a_piece_is_read_into_place(
    tmp_path: Path, shape: tuple[int, int], shares: tuple[float, ...]
) -> None:
    whole, part = write(tmp_path, shape, torch.float32), part_of(shape, shares)
    out = torch.full(whole[part].shape, torch.nan)
    within = torch.full((whole[part].shape[0], whole[part].shape[1] + 2), torch.nan)
    with SafetensorsFile(tmp_path / "model.safetensors") as file:
        read_region(file, file.entries["matrix"], part, out)
        read_region(file, file.entries["matrix"], part, within[:, 1:-1])
    assert torch.equal(out, whole[part])
    assert torch.equal(within[:, 1:-1], out)
    assert within[:, [0, -1]].isnan().all()


@pytest.mark.parametrize(
    "place", [0, COMPARED_BYTES // 4 + 1, 2 * COMPARED_BYTES // 4 + 7], ids=["first", "middle", "last"]
)
def test_two_tensors_of_many_pieces_are_told_apart_wherever_they_differ(tmp_path: Path, place: int) -> None:
    one = torch.zeros(2 * COMPARED_BYTES // 4 + 8)
    other = one.clone()
    other[place] = 1.0
    save_file({"one": one, "same": one.clone(), "other": other}, tmp_path / "model.safetensors")
    with HFCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.is_bitwise_equal("one", "same")
        assert not checkpoint.is_bitwise_equal("one", "other")
