"""The images of packed documents: their patches, where they stand among the tokens, and the positions of both."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from archon.models.args.base import ImageFormat
from archon.parallel.transfer import to_device_async
from archon.schema.errors import BatchError

Grid = tuple[int, int]
"""An image's size in patches: rows and columns, both multiples of the tower's `merge_size`."""


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """One image as a model takes it, on the CPU; a trajectory carries it next to its tokens.

    Attributes:
        pixel_values: float32 [P, F], the pixels of each patch, in the order of `PackedImages.patches`.
        grid: frames, rows and columns in patches, as transformers' `image_grid_thw`; one frame, and P in all.
    """

    pixel_values: Tensor
    grid: tuple[int, int, int]

    def __post_init__(self) -> None:
        frames, height, width = self.grid
        if frames != 1:
            raise BatchError(f"a picture's grid is {self.grid}; expected one frame, since videos are not supported")
        if self.pixel_values.ndim != 2 or len(self.pixel_values) != height * width:
            raise BatchError(
                f"a picture of {height} x {width} patches came with pixels {tuple(self.pixel_values.shape)}; expected "
                f"[{height * width}, features]"
            )

    @property
    def size(self) -> Grid:
        """Rows and columns in patches."""
        return self.grid[1], self.grid[2]

    @cached_property
    def digest(self) -> str:
        """A hash of pixels and size: pictures with the same one are the same to a model."""
        pixels = self.pixel_values.contiguous()
        data = hashlib.sha256(f"{self.grid} {pixels.dtype}".encode())
        data.update(pixels.flatten().view(torch.uint8).numpy().tobytes())
        return data.hexdigest()


def is_image_batch(images: Any) -> bool:
    """Returns whether these are lists of `ProcessedImage`s, one list for each row."""
    return isinstance(images, list) and all(
        isinstance(row, list | tuple) and all(isinstance(image, ProcessedImage) for image in row) for row in images
    )


@dataclass(frozen=True)
class PackedImages:
    """The images of all documents of a pack, in the order of the documents.

    Attributes:
        patches: [P, F], the pixels of each patch. The patches that a tower merges into one row follow each other: an
            image's squares of `merge_size` by `merge_size` patches row by row, and in a square its patches row by row.
        grids: the size of each image; P is the sum of rows times columns.
        rows: int64 [M], the token that each merged patch replaces.
        merged: int64 [M], which merged patches these are, where a rank has but some of the tokens; None for all.
        computed: [M, 1 + D, dim], what the tower makes of them, where that is known; patches are then none.
    """

    patches: Tensor
    grids: tuple[Grid, ...]
    rows: Tensor
    merged: Tensor | None = None
    computed: Tensor | None = None

    @classmethod
    def from_features(cls, rows: Tensor, computed: Tensor) -> PackedImages:
        """Returns merged patches that the tower has computed before, [M, 1 + D, dim], for the tokens `rows` [M]."""
        return cls(computed[:0], (), rows, computed=computed)

    def encode(self, encode_images: Callable[[Tensor, tuple[Grid, ...]], Tensor]) -> ImageFeatures:
        """Returns what a forward needs of the images; `encode_images` is `BaseArchonModel.encode_images`."""
        features = encode_images(self.patches, self.grids) if self.computed is None else self.computed
        return ImageFeatures(self.rows, features if self.merged is None else features.index_select(0, self.merged))

    @classmethod
    def of(
        cls, tokens: Tensor, patches: Tensor, grids: Sequence[Grid], image_token: int, merge_size: int
    ) -> PackedImages:
        """Returns the images of the pack `tokens` [T], whose placeholders are `image_token`.

        Raises BatchError, which counts both, unless there are as many placeholders as merged patches.
        """
        rows = _placeholder_indices(tokens, grids, image_token, merge_size)
        pixels = sum(height * width for height, width in grids)
        if len(patches) != pixels:
            raise BatchError(f"images of {pixels} patches in all came with the pixels of {len(patches)}")
        return cls(patches, tuple(grids), rows)

    @classmethod
    def from_images(cls, tokens: Tensor, images: Sequence[ProcessedImage], image_format: ImageFormat) -> PackedImages:
        """Returns `of` for pictures, in the order of their placeholders."""
        patches = torch.cat([image.pixel_values for image in images])
        return cls.of(tokens, patches, [image.size for image in images], image_format.token, image_format.merge_size)

    @classmethod
    def empty(cls, image_format: ImageFormat, device: torch.device) -> PackedImages:
        """Returns one square of zeros that replaces no token: for a rank whose part in a tower's collectives other
        ranks need. Gradients of the tower are then 0."""
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        patches = torch.zeros(image_format.merge_size**2, image_format.features, device=device)
        return cls(patches, ((image_format.merge_size, image_format.merge_size),), nothing, nothing)

    def for_shard(self, rows: Tensor, merged: Tensor) -> PackedImages:
        """Returns the images for a rank that holds these of the merged patches, at these of its own tokens."""
        return replace(self, rows=rows, merged=merged)

    def to(self, device: torch.device) -> PackedImages:
        """Returns the images on `device`."""
        merged = None if self.merged is None else to_device_async(self.merged, device)
        patches, rows = (to_device_async(x, device) for x in (self.patches, self.rows))
        return replace(self, patches=patches, rows=rows, merged=merged)


@dataclass(frozen=True)
class ImageFeatures:
    """What a tower makes of the merged patches that a rank has tokens of.

    Attributes:
        tokens: int64 [M], those that the patches replace.
        features: [M, 1 + D, dim]: of each patch its embedding, and what each of the first D layers is given of it
            (DeepStack: Meng et al. 2024, arXiv:2406.04334).
    """

    tokens: Tensor
    features: Tensor

    def embed(self, hidden: Tensor) -> Tensor:
        """Returns embeddings [T, dim] with those of the patches at their tokens."""
        return hidden.index_copy(0, self.tokens, self.features[:, 0].to(hidden.dtype))

    def add(self, hidden: Tensor, layer: int) -> Tensor:
        """Returns the output [T, dim] of a layer (from 0), plus what it is given of each patch."""
        if layer + 1 >= self.features.shape[1]:
            return hidden
        return hidden.index_add(0, self.tokens, self.features[:, layer + 1].to(hidden.dtype))


def require_images(images: Sequence[ProcessedImage], image_format: ImageFormat) -> None:
    """Raise BatchError for pictures whose patches are not of this model's size."""
    for image in images:
        if image.pixel_values.shape[1] != image_format.features:
            raise BatchError(
                f"a picture's patches have {image.pixel_values.shape[1]} numbers, and this model's have "
                f"{image_format.features}; was it made for another model?"
            )


def _placeholder_indices(tokens: Tensor, grids: Sequence[Grid], image_token: int, merge_size: int) -> Tensor:
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
    places = _placeholder_indices(tokens, grids, image_token, merge_size).tolist()
    starts, merged, used = list[int](), list[Grid](), 0
    for height, width in grids:
        rows, columns = height // merge_size, width // merge_size
        start, count = places[used], rows * columns
        if places[used + count - 1] != start + count - 1:
            raise BatchError(
                f"the {count} placeholders of an image of {height} x {width} patches do not follow each other; "
                f"expected them from token {start} on"
            )
        starts.append(start)
        merged.append((rows, columns))
        used += count
    positions, following = _image_positions(tuple(starts), tuple(merged))
    left = len(tokens) - positions.shape[1]
    after = torch.arange(following, following + left).expand(3, -1)
    return torch.cat((positions, after), dim=1), following + left


@lru_cache(maxsize=64)
def _image_positions(starts: tuple[int, ...], sizes: tuple[Grid, ...]) -> tuple[Tensor, int]:
    """Returns the positions int64 [3, T] of the tokens up to the end of the last image, and that of the next token.

    The answers to a prompt differ only in what follows.

    Args:
        starts: the first placeholder of each image.
        sizes: rows and columns of its merged patches.
    """
    end = starts[-1] + sizes[-1][0] * sizes[-1][1] if starts else 0
    positions = torch.empty(3, end, dtype=torch.int64)
    token = position = 0  # of tokens and positions, how many are done
    for start, (rows, columns) in zip(starts, sizes, strict=True):
        positions[:, token:start] = torch.arange(position, position + start - token)
        position += start - token
        token = start + rows * columns
        positions[0, start:token] = position
        positions[1, start:token] = position + torch.arange(rows).repeat_interleave(columns)
        positions[2, start:token] = position + torch.arange(columns).repeat(rows)
        position += max(rows, columns)
    return positions, position


def patch_coordinates(grids: Sequence[Grid], merge_size: int) -> Tensor:
    """Returns the row and column int64 [2, P] of each patch in its image, in the order of `PackedImages.patches`."""
    coordinates = []
    for height, width in grids:
        grid = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
        squares = grid.view(2, height // merge_size, merge_size, width // merge_size, merge_size)
        coordinates.append(squares.transpose(2, 3).reshape(2, -1))
    return torch.cat(coordinates, dim=1)
