"""The pictures of prompts: where they stand, and their rows of the residual stream, computed once for all answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from operator import is_

import numpy as np
import torch
from torch import Tensor

from archon.models.args import ImageFormat
from archon.models.base import BaseArchonModel
from archon.models.vision.images import PackedImages, Picture, multimodal_positions, require_pictures
from archon.parallel.transfer import to_device_async
from archon.schema.errors import BatchError, RolloutError


@dataclass(frozen=True, eq=False)
class PromptPictures:
    """The pictures of one prompt.

    Attributes:
        tokens: the prompt.
        pictures: in the order of their placeholders.
        spans: the first placeholder of each picture and the one after its last.
        positions: int64 [3, L], time, row and column of each of the prompt's tokens.
        offset: what the position of a later token differs from its number, in all three.
    """

    tokens: tuple[int, ...]
    pictures: tuple[Picture, ...]
    spans: tuple[tuple[int, int], ...]
    positions: np.ndarray
    offset: int

    @classmethod
    def of(cls, tokens: Sequence[int], pictures: Sequence[Picture], image: ImageFormat, what: str) -> PromptPictures:
        """Returns the pictures of a prompt. Raises RolloutError, which begins with `what`, unless its placeholders are
        those of the pictures, and these are of this model."""
        wrong = [type(each).__name__ for each in pictures if not isinstance(each, Picture)]
        if wrong:
            raise RolloutError(
                f"{what}: image_data has a {wrong[0]}; expected those of archon.data.pictures.PictureReader"
            )
        ids = torch.tensor(tokens)
        try:
            require_pictures(pictures, image)
            sizes = [picture.size for picture in pictures]
            positions, following = multimodal_positions(ids, sizes, image.token, image.merge_size)
        except BatchError as error:
            raise RolloutError(f"{what}: {error}") from None
        places, used, spans = (ids == image.token).nonzero().flatten().tolist(), 0, []
        for picture in pictures:
            count = picture.pixel_values.shape[0] // image.merge_size**2
            spans.append((places[used], places[used] + count))
            used += count
        return cls(tuple(tokens), tuple(pictures), tuple(spans), positions.numpy(), following - len(tokens))

    def are_of(self, tokens: Sequence[int], pictures: Collection[Picture]) -> bool:
        """Returns whether these are the pictures, the same objects, of that prompt."""
        same = len(pictures) == len(self.pictures) and all(map(is_, pictures, self.pictures))
        return same and self.tokens == tuple(tokens)

    @property
    def key(self) -> tuple[str, ...]:
        """What distinguishes prompts of the same tokens."""
        return tuple(picture.digest for picture in self.pictures)

    def positions_of(self, start: int, stop: int) -> np.ndarray:
        """Returns int64 [3, stop − start], the positions of these tokens of prompt and answer."""
        length = self.positions.shape[1]
        later = np.arange(max(start, length), max(stop, length)) + self.offset
        return np.concatenate([self.positions[:, start:stop], np.broadcast_to(later, (3, len(later)))], axis=1)


@dataclass
class _SharedRows:
    users: int = 0
    rows: Tensor | None = None


@dataclass
class PictureRows:
    """What the tower makes of the pictures of unfinished requests, each computed once.

    Attributes:
        computed: how many pictures the tower has seen.
    """

    model: BaseArchonModel
    device: torch.device
    computed: int = 0
    _shared: dict[str, _SharedRows] = field(default_factory=dict)

    def begin(self, pictures: Iterable[Picture]) -> None:
        """Note a request with these pictures."""
        for picture in pictures:
            self._shared.setdefault(picture.digest, _SharedRows()).users += 1

    def end(self, pictures: Iterable[Picture]) -> None:
        """Note the end of a request with these pictures; rows that no other has are freed."""
        for picture in pictures:
            shared = self._shared[picture.digest]
            shared.users -= 1
            if not shared.users:
                del self._shared[picture.digest]

    def forget(self) -> None:
        """Drop all rows, after the weights have changed."""
        for shared in self._shared.values():
            shared.rows = None

    def packed(self, chunks: Sequence[tuple[PromptPictures | None, int, int, int]]) -> PackedImages | None:
        """Returns the rows of pictures for a forward; None without one.

        Args:
            chunks: of each its prompt's pictures, its first token in the prompt and the one after its last, and the
                row of its first token in the forward.
        """
        parts: list[tuple[Picture, int, int]] = []
        rows: list[Tensor] = []
        for prompt, start, stop, first in chunks:
            for picture, (begin, end) in zip(*((prompt.pictures, prompt.spans) if prompt else ((), ())), strict=True):
                low, high = max(begin, start), min(end, stop)
                if low < high:
                    parts.append((picture, low - begin, high - begin))
                    rows.append(torch.arange(first + low - start, first + high - start))
        if not parts:
            return None
        self._compute([picture for picture, _, _ in parts])
        merged = torch.cat([self._rows_of(picture)[low:high] for picture, low, high in parts])
        return PackedImages.of_rows(to_device_async(torch.cat(rows), self.device), merged)

    def _rows_of(self, picture: Picture) -> Tensor:
        rows = self._shared[picture.digest].rows
        assert rows is not None
        return rows

    def _compute(self, pictures: Sequence[Picture]) -> None:
        """Run the tower over those pictures that it has not seen, at once."""
        new = {each.digest: each for each in pictures if self._shared[each.digest].rows is None}
        if not new:
            return
        pixels = [picture.pixel_values for picture in new.values()]
        sizes = tuple(picture.size for picture in new.values())
        features = self.model.see(to_device_async(torch.cat(pixels), self.device), sizes)
        square = sum(map(len, pixels)) // len(features)
        for digest, rows in zip(new, features.split([len(part) // square for part in pixels]), strict=True):
            self._shared[digest].rows = rows
        self.computed += len(new)
