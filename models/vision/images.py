"""Images of packed documents: patches, placeholder tokens and positions."""

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
"""Rows and columns of patches in an image, both multiples of the encoder's `merge_size`."""


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """Preprocessed image on the CPU; a trajectory holds it next to its tokens.

    Attributes:
        pixel_values: float32 [P, F], the pixels of each patch, in the order of `PackedImages.patches`.
        grid: (1, rows, columns) in patches, as transformers' `image_grid_thw`; P = rows * columns.
    """

    pixel_values: Tensor
    grid: tuple[int, int, int]

    def __post_init__(self) -> None:
        frames, height, width = self.grid
        if frames != 1:
            raise BatchError(f"the image grid is {self.grid}; expected one frame, since videos are not supported")
        if self.pixel_values.ndim != 2 or len(self.pixel_values) != height * width:
            raise BatchError(
                f"an image of {height} x {width} patches has pixel_values {tuple(self.pixel_values.shape)}; expected "
                f"[{height * width}, features]"
            )

    @property
    def size(self) -> Grid:
        """Rows and columns in patches."""
        return self.grid[1], self.grid[2]

    @cached_property
    def digest(self) -> str:
        """Hash of pixels and size; images with equal digests are identical to a model."""
        pixels = self.pixel_values.contiguous()
        data = hashlib.sha256(f"{self.grid} {pixels.dtype}".encode())
        data.update(pixels.flatten().view(torch.uint8).numpy().tobytes())
        return data.hexdigest()


def is_image_batch(images: Any) -> bool:
    """Return whether `images` has a list of `ProcessedImage`s for each row."""
    return isinstance(images, list) and all(
        isinstance(row, list | tuple) and all(isinstance(image, ProcessedImage) for image in row) for row in images
    )


@dataclass(frozen=True)
class PackedImages:
    """Images of all documents of a pack, in document order.

    Attributes:
        patches: [P, F], the pixels of each patch. Patches of one merged square are adjacent: squares of `merge_size` x
            `merge_size` patches row by row, and the patches of a square row by row.
        grids: Size of each image; P is the sum of rows * columns.
        rows: int64 [M], the token that each merged patch replaces.
        merged: int64 [M], the indices of this rank's merged patches; None for all.
        computed: [M, 1 + D, dim], precomputed vision-encoder output; `patches` is then empty.
    """

    patches: Tensor
    grids: tuple[Grid, ...]
    rows: Tensor
    merged: Tensor | None = None
    computed: Tensor | None = None

    @classmethod
    def from_features(cls, rows: Tensor, computed: Tensor) -> PackedImages:
        """Wrap precomputed encoder output [M, 1 + D, dim] for the tokens `rows` [M]."""
        return cls(computed[:0], (), rows, computed=computed)

    def encode(self, encode_images: Callable[[Tensor, tuple[Grid, ...]], Tensor]) -> ImageFeatures:
        """Return the features for a forward; `encode_images` is `BaseArchonModel.encode_images`."""
        features = encode_images(self.patches, self.grids) if self.computed is None else self.computed
        return ImageFeatures(self.rows, features if self.merged is None else features.index_select(0, self.merged))

    @classmethod
    def of(
        cls, tokens: Tensor, patches: Tensor, grids: Sequence[Grid], image_token: int, merge_size: int
    ) -> PackedImages:
        """Assign images to the placeholders `image_token` of the pack `tokens` [T].

        Raises:
            BatchError: The number of placeholders differs from the number of merged patches.
        """
        rows = _placeholder_indices(tokens, grids, image_token, merge_size)
        pixels = sum(height * width for height, width in grids)
        if len(patches) != pixels:
            raise BatchError(
                f"the images have {pixels} patches, but pixels are there for {len(patches)}; expected equal counts"
            )
        return cls(patches, tuple(grids), rows)

    @classmethod
    def from_images(cls, tokens: Tensor, images: Sequence[ProcessedImage], image_format: ImageFormat) -> PackedImages:
        """Assign preprocessed images to the placeholders of `tokens`, in order."""
        patches = torch.cat([image.pixel_values for image in images])
        return cls.of(tokens, patches, [image.size for image in images], image_format.token, image_format.merge_size)

    @classmethod
    def empty(cls, image_format: ImageFormat, device: torch.device) -> PackedImages:
        """Return one square of zeros that replaces no token.

        A rank without images runs the encoder on it to take part in the collectives; its gradients are 0.
        """
        no_rows = torch.zeros(0, dtype=torch.int64, device=device)
        patches = torch.zeros(image_format.merge_size**2, image_format.features, device=device)
        return cls(patches, ((image_format.merge_size, image_format.merge_size),), no_rows, no_rows)

    def for_shard(self, rows: Tensor, merged: Tensor) -> PackedImages:
        """Return the images of a rank that holds the patches `merged` at its local tokens `rows`."""
        return replace(self, rows=rows, merged=merged)

    def to(self, device: torch.device) -> PackedImages:
        """Return the images on `device`."""
        merged = None if self.merged is None else to_device_async(self.merged, device)
        patches, rows = (to_device_async(x, device) for x in (self.patches, self.rows))
        return replace(self, patches=patches, rows=rows, merged=merged)


@dataclass(frozen=True)
class ImageFeatures:
    """Encoder output of the merged patches of a rank's tokens.

    Attributes:
        tokens: int64 [M], the tokens that the patches replace.
        features: [M, 1 + D, dim], the embedding of each patch and its additions to the outputs of the first D layers
            (DeepStack: Meng et al. 2024, arXiv:2406.04334).
    """

    tokens: Tensor
    features: Tensor

    def embed(self, hidden: Tensor) -> Tensor:
        """Return embeddings [T, dim] with the placeholder rows replaced by patch embeddings."""
        return hidden.index_copy(0, self.tokens, self.features[:, 0].to(hidden.dtype))

    def add(self, hidden: Tensor, layer: int) -> Tensor:
        """Return the output [T, dim] of a layer (from 0) plus its DeepStack features."""
        if layer + 1 >= self.features.shape[1]:
            return hidden
        return hidden.index_add(0, self.tokens, self.features[:, layer + 1].to(hidden.dtype))


def require_images(images: Sequence[ProcessedImage], image_format: ImageFormat) -> None:
    """Raise BatchError if an image has patches of another size than the model's."""
    for image in images:
        if image.pixel_values.shape[1] != image_format.features:
            raise BatchError(
                f"the patches of an image have {image.pixel_values.shape[1]} values, this model's have "
                f"{image_format.features}; preprocess the image with this checkpoint's processor"
            )


def _placeholder_indices(tokens: Tensor, grids: Sequence[Grid], image_token: int, merge_size: int) -> Tensor:
    """Return the placeholder indices int64 [M]; raise BatchError unless there is one per merged patch."""
    for height, width in grids:
        if min(height, width) < 1 or height % merge_size or width % merge_size:
            raise BatchError(
                f"an image has {height} x {width} patches; expected multiples of the merge size {merge_size}"
            )
    rows = (tokens == image_token).nonzero().squeeze(1)
    expected = sum(height * width for height, width in grids) // merge_size**2
    if len(rows) != expected:
        raise BatchError(
            f"{len(rows)} placeholder tokens ({image_token}) for {len(grids)} images with {expected} merged patches; "
            "expected one placeholder per merged patch"
        )
    return rows


def multimodal_positions(
    tokens: Tensor, grids: Sequence[Grid], image_token: int, merge_size: int
) -> tuple[Tensor, int]:
    """Compute M-RoPE positions int64 [3, T] (time, row, column) of tokens [T], and the next position.

    Text advances all three axes by one per token (Qwen2-VL, arXiv:2409.12191, section 2.1). The merged patches of an
    image share one time; their rows and columns count from there. The next token follows the largest of these, and
    decoded tokens advance by one each.

    Raises:
        BatchError: An image lacks placeholders, or they are not adjacent.
    """
    places = _placeholder_indices(tokens, grids, image_token, merge_size).tolist()
    starts, merged, used = list[int](), list[Grid](), 0
    for height, width in grids:
        rows, columns = height // merge_size, width // merge_size
        start, count = places[used], rows * columns
        if places[used + count - 1] != start + count - 1:
            raise BatchError(
                f"the {count} placeholders of an image of {height} x {width} patches are not adjacent; "
                f"expected them from token {start} on"
            )
        starts.append(start)
        merged.append((rows, columns))
        used += count
    positions, following = _image_positions(tuple(starts), tuple(merged))
    n_trailing = len(tokens) - positions.shape[1]
    after = torch.arange(following, following + n_trailing).expand(3, -1)
    return torch.cat((positions, after), dim=1), following + n_trailing


@lru_cache(maxsize=64)
def _image_positions(starts: tuple[int, ...], sizes: tuple[Grid, ...]) -> tuple[Tensor, int]:
    """Return positions int64 [3, T] of the tokens up to the end of the last image, and the next position.

    `starts` are the first placeholders of the images, `sizes` their rows and columns of merged patches. Cached, since
    all answers to a prompt share this part.
    """
    end = starts[-1] + sizes[-1][0] * sizes[-1][1] if starts else 0
    positions = torch.empty(3, end, dtype=torch.int64)
    token = position = 0  # next token and next position
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
    """Return row and column int64 [2, P] of each patch in its image, in the order of `PackedImages.patches`."""
    coordinates = []
    for height, width in grids:
        grid = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
        squares = grid.view(2, height // merge_size, merge_size, width // merge_size, merge_size)
        coordinates.append(squares.transpose(2, 3).reshape(2, -1))
    return torch.cat(coordinates, dim=1)


def window_order(grids: Sequence[Grid], merge_size: int, window: int) -> tuple[Tensor, tuple[int, ...]]:
    """Return the decoder rows int64 [M] of images sorted by window, and the number of patches of each window.

    A window has at most window x window decoder rows; the last ones of an image are smaller. Windows, and the rows of a
    window, are in row-major order.
    """
    order, lengths, start = list[Tensor](), list[int](), 0
    for height, width in grids:
        rows, columns = height // merge_size, width // merge_size
        numbers = torch.arange(start, start + rows * columns).view(rows, columns)
        parts = [part.flatten() for strip in numbers.split(window) for part in strip.split(window, dim=1)]
        order += parts
        lengths += [len(part) * merge_size**2 for part in parts]
        start += rows * columns
    return torch.cat(order), tuple(lengths)
