"""The images of packed documents: their patches, where they stand among the tokens, and the positions of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from archon.schema.errors import BatchError

Grid = tuple[int, int]
"""An image's size in patches: rows and columns, both multiples of the tower's `merge_size`."""


@dataclass(frozen=True)
class PackedImages:
    """The images of all documents of a pack, in the order of the documents.

    Attributes:
        patches: [P, F], the pixels of each patch. The patches that a tower merges into one row follow each other: an
            image's squares of `merge_size` by `merge_size` patches row by row, and in a square its patches row by row.
        grids: the size of each image; P is the sum of rows times columns.
        rows: int64 [M], the token that each merged patch replaces.
    """

    patches: Tensor
    grids: tuple[Grid, ...]
    rows: Tensor

    @classmethod
    def of(
        cls, tokens: Tensor, patches: Tensor, grids: Sequence[Grid], image_token: int, merge_size: int
    ) -> PackedImages:
        """Returns the images of the pack `tokens` [T], whose placeholders are `image_token`.

        Raises BatchError, which counts both, unless there are as many placeholders as merged patches.
        """
        rows = _placeholders(tokens, grids, image_token, merge_size)
        pixels = sum(height * width for height, width in grids)
        if len(patches) != pixels:
            raise BatchError(f"images of {pixels} patches in all came with the pixels of {len(patches)}")
        return cls(patches, tuple(grids), rows)


def _placeholders(tokens: Tensor, grids: Sequence[Grid], image_token: int, merge_size: int) -> Tensor:
    """Returns the indices int64 [M] of the placeholders. Raises BatchError unless M is what the images give."""
    for height, width in grids:
        if min(height, width) < 1 or height % merge_size or width % merge_size:
            raise BatchError(
                f"an image has {height} x {width} patches; expected multiples of {merge_size}, which the model merges"
            )
    rows = (tokens == image_token).nonzero().squeeze(1)
    wanted = sum(height * width for height, width in grids) // merge_size**2
    if len(rows) != wanted:
        raise BatchError(
            f"{len(rows)} placeholder tokens ({image_token}) for {len(grids)} images that give {wanted} rows; expected "
            "a placeholder for each row"
        )
    return rows


def multimodal_positions(
    tokens: Tensor, grids: Sequence[Grid], image_token: int, merge_size: int
) -> tuple[Tensor, int]:
    """Returns the positions int64 [3, T] of a document's tokens [T]: time, row and column; and that of the next token.

    Text counts on in all three (Qwen2-VL, arXiv:2409.12191, section 2.1). An image's merged patches have one time, and
    their row and column from there; what follows begins after the largest of these. So does what is decoded: each
    further token stands one after the one before.

    Raises BatchError unless each image has its placeholders, one after another.
    """
    places = _placeholders(tokens, grids, image_token, merge_size).tolist()
    positions = torch.empty(3, len(tokens), dtype=torch.int64)
    token = position = used = 0  # of tokens, positions and placeholders, how many are done
    for height, width in grids:
        rows, columns = height // merge_size, width // merge_size
        start, count = places[used], rows * columns
        if places[used + count - 1] != start + count - 1:
            raise BatchError(
                f"the {count} placeholders of an image of {height} x {width} patches do not follow each other; "
                f"expected them from token {start} on"
            )
        positions[:, token:start] = torch.arange(position, position + start - token)
        position += start - token
        token, used = start + count, used + count
        positions[0, start:token] = position
        positions[1, start:token] = position + torch.arange(rows).repeat_interleave(columns)
        positions[2, start:token] = position + torch.arange(columns).repeat(rows)
        position += max(rows, columns)
    left = len(tokens) - token
    positions[:, token:] = torch.arange(position, position + left)
    return positions, position + left


def patch_coordinates(grids: Sequence[Grid], merge_size: int) -> Tensor:
    """Returns the row and column int64 [2, P] of each patch in its image, in the order of `PackedImages.patches`."""
    coordinates = []
    for height, width in grids:
        grid = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
        squares = grid.view(2, height // merge_size, merge_size, width // merge_size, merge_size)
        coordinates.append(squares.transpose(2, 3).reshape(2, -1))
    return torch.cat(coordinates, dim=1)
