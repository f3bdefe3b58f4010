"""Images of prompts: their placeholders, and their hidden states, encoded once for all answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import is_

import numpy as np
import torch
from torch import Tensor

from archon.models.args.base import ImageFormat
from archon.models.base import BaseArchonModel
from archon.models.vision.images import PackedImages, ProcessedImage, multimodal_positions, require_images
from archon.parallel.transfer import to_device_async
from archon.schema.errors import BatchError, RolloutError


@dataclass(frozen=True, eq=False)
class PromptImages:
    """Images of one prompt.

    Attributes:
        tokens: token ids of the prompt.
        images: images in the order of their placeholders.
        spans: [first, end) placeholder positions of each image.
        positions: int64 [3, L]: M-RoPE time, row and column of each prompt token.
        offset: M-RoPE position minus token index after the last image (same on all three axes).
    """

    tokens: tuple[int, ...]
    images: tuple[ProcessedImage, ...]
    spans: tuple[tuple[int, int], ...]
    positions: np.ndarray
    offset: int

    @classmethod
    def of(
        cls, tokens: Sequence[int], images: Sequence[ProcessedImage], image_format: ImageFormat, what: str
    ) -> PromptImages:
        """Match a prompt with its images.

        Raises:
            RolloutError: the images do not match the placeholders or this model; the message starts with `what`.
        """
        wrong = [type(each).__name__ for each in images if not isinstance(each, ProcessedImage)]
        if wrong:
            raise RolloutError(f"{what}: image_data has a {wrong[0]}; use archon.data.images.ImageReader")
        ids = torch.tensor(tokens)
        try:
            require_images(images, image_format)
            sizes = [image.size for image in images]
            positions, following = multimodal_positions(ids, sizes, image_format.token, image_format.merge_size)
        except BatchError as error:
            raise RolloutError(f"{what}: {error}") from None
        places, used, spans = (ids == image_format.token).nonzero().flatten().tolist(), 0, []
        for image in images:
            count = image.pixel_values.shape[0] // image_format.merge_size**2
            spans.append((places[used], places[used] + count))
            used += count
        return cls(tuple(tokens), tuple(images), tuple(spans), positions.numpy(), following - len(tokens))

    def matches_prompt(self, tokens: Sequence[int], images: Collection[ProcessedImage]) -> bool:
        """Return whether this prompt has the same image objects at the same places."""
        same = len(images) == len(self.images) and all(map(is_, images, self.images))
        return same and self.tokens == tuple(tokens)

    @property
    def key(self) -> tuple[str, ...]:
        """Key that distinguishes prompts with equal tokens and different images."""
        return tuple(image.digest for image in self.images)

    def positions_between(self, start: int, stop: int) -> np.ndarray:
        """Return int64 [3, stop − start], the positions of these tokens of prompt and answer."""
        length = self.positions.shape[1]
        later = np.arange(max(start, length), max(stop, length)) + self.offset
        return np.concatenate([self.positions[:, start:stop], np.broadcast_to(later, (3, len(later)))], axis=1)


@dataclass
class _SharedRows:
    users: int = 0
    rows: Tensor | None = None


@dataclass
class ImageFeatureCache:
    """Vision-encoder outputs of the images of unfinished requests, each computed once.

    Attributes:
        computed: number of encoded images.
    """

    model: BaseArchonModel
    device: torch.device
    computed: int = 0
    _shared: dict[str, _SharedRows] = field(default_factory=dict)

    def begin(self, images: Iterable[ProcessedImage]) -> None:
        """Register a request with these images."""
        for image in images:
            self._shared.setdefault(image.digest, _SharedRows()).users += 1

    def end(self, images: Iterable[ProcessedImage]) -> None:
        """Unregister a request with these images, and free the outputs of images without requests."""
        for image in images:
            shared = self._shared[image.digest]
            shared.users -= 1
            if not shared.users:
                del self._shared[image.digest]

    def clear(self) -> None:
        """Drop all rows, after the weights have changed."""
        for shared in self._shared.values():
            shared.rows = None

    def packed(self, chunks: Sequence[tuple[PromptImages | None, int, int, int]]) -> PackedImages | None:
        """Return the image rows of a forward; None without images.

        Args:
            chunks: for each chunk the images of its prompt, its [first, end) token in the prompt, and the row of its
                first token in the forward.
        """
        parts: list[tuple[ProcessedImage, int, int]] = []
        rows: list[Tensor] = []
        for prompt, start, stop, first in chunks:
            for image, (begin, end) in zip(*((prompt.images, prompt.spans) if prompt else ((), ())), strict=True):
                low, high = max(begin, start), min(end, stop)
                if low < high:
                    parts.append((image, low - begin, high - begin))
                    rows.append(torch.arange(first + low - start, first + high - start))
        if not parts:
            return None
        self._compute([image for image, _, _ in parts])
        merged = torch.cat([self._rows_of(image)[low:high] for image, low, high in parts])
        return PackedImages.from_features(to_device_async(torch.cat(rows), self.device), merged)

    def _rows_of(self, image: ProcessedImage) -> Tensor:
        rows = self._shared[image.digest].rows
        assert rows is not None
        return rows

    def _compute(self, images: Sequence[ProcessedImage]) -> None:
        """Encode all new images in one pass."""
        new = {each.digest: each for each in images if self._shared[each.digest].rows is None}
        if not new:
            return
        pixels = [image.pixel_values for image in new.values()]
        sizes = tuple(image.size for image in new.values())
        features = self.model.encode_images(to_device_async(torch.cat(pixels), self.device), sizes)
        square = sum(map(len, pixels)) // len(features)
        for digest, rows in zip(new, features.split([len(part) // square for part in pixels]), strict=True):
            self._shared[digest].rows = rows
        self.computed += len(new)
