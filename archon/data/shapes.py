"""`shapes`: small drawn images with a question on count, color or place; generated from a seed."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from archon.data.images import ImageReader
from archon.data.mapping import rl_dataset, sft_dataset
from archon.data.rows import RowDataset
from archon.data.sources import SourceRow
from archon.schema.errors import DatasetError

N_TRAIN, N_TEST = 4000, 400
SIDE = 3
"""Rows and columns of an image's grid."""
CELL = 16
"""Pixels of a cell."""
COLORS = {"red": (214, 40, 40), "green": (44, 160, 44), "blue": (31, 78, 200), "yellow": (240, 200, 20)}
SHAPES = ("circle", "square", "triangle")
PLACES = ("left", "middle", "right")
KINDS = {"count": "how many", "color": "color of", "place": "where is"}
"""Kinds of questions, and the start of each kind."""
_KEYS: dict[str, Any] = {"prompt_key": "question", "response_key": "answer"}


@dataclass(frozen=True)
class Scene:
    """Content of an image: for each cell, row by row, a color and a shape, or nothing."""

    cells: tuple[tuple[str, str] | None, ...]

    @classmethod
    def random(cls, rng: random.Random) -> Scene:
        """Return a scene with one shape at least, drawn by `rng`."""
        count = rng.randint(1, 5)
        taken = {*rng.sample(range(SIDE**2), count)}
        return cls(
            tuple((rng.choice([*COLORS]), rng.choice(SHAPES)) if place in taken else None for place in range(SIDE**2))
        )

    def questions(self) -> Iterator[tuple[str, str]]:
        """Yield every question on the scene, each with its answer."""
        shown = [cell for cell in self.cells if cell is not None]
        for color in COLORS:
            yield f"how many {color}?", str(sum(cell[0] == color for cell in shown))
        for shape in SHAPES:
            colors = {color for color, other in shown if other == shape}
            if len(colors) == 1:
                yield f"color of {shape}?", colors.pop()
        for color in COLORS:
            columns = {place % SIDE for place, cell in enumerate(self.cells) if cell is not None and cell[0] == color}
            if len(columns) == 1:
                yield f"where is {color}?", PLACES[columns.pop()]

    def image(self) -> bytes:
        """Return the scene as the bytes of a PNG file of `SIDE` times `CELL` pixels each way, on white."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (SIDE * CELL, SIDE * CELL), (255, 255, 255))
        draw = ImageDraw.Draw(image)
        for place, cell in enumerate(self.cells):
            if cell is None:
                continue
            left, top = place % SIDE * CELL + 2, place // SIDE * CELL + 2
            right, bottom = left + CELL - 5, top + CELL - 5
            color, shape = COLORS[cell[0]], cell[1]
            if shape == "circle":
                draw.ellipse((left, top, right, bottom), fill=color)
            elif shape == "square":
                draw.rectangle((left, top, right, bottom), fill=color)
            else:
                draw.polygon([((left + right) / 2, top), (left, bottom), (right, bottom)], fill=color)
        data = io.BytesIO()
        image.save(data, "PNG")
        return data.getvalue()


def scenes(split: str = "train", seed: int = 0, subset: str | None = None) -> list[tuple[Scene, str, str]]:
    """Return the scenes of a split, each with a question and its answer; all scenes of both splits are distinct.

    Kinds of questions, and answers of a kind, are balanced by chance: a model that ignores the image is right in a
    third of them. `subset` joins names of `KINDS` by "+"; None: all.

    Raises:
        DatasetError: unknown split or kind.
    """
    if split not in ("train", "test"):
        raise DatasetError(f"split is {split!r}; expected 'train' or 'test' of the shapes dataset")
    kinds = [*KINDS] if subset is None else subset.split("+")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise DatasetError(
            f"subset is {subset!r}, and the shapes dataset has no questions of kind {unknown[0]!r}; expected some of "
            f"{', '.join(KINDS)}, joined by +"
        )
    rng, seen = random.Random(f"shapes {seed}"), dict[Scene, tuple[str, str]]()
    while len(seen) < N_TEST + N_TRAIN:
        scene = Scene.random(rng)
        questions = [*scene.questions()]
        of_kinds = [[asked for asked in questions if asked[0].startswith(KINDS[kind])] for kind in kinds]
        if some := [of_kind for of_kind in of_kinds if of_kind]:
            seen.setdefault(scene, rng.choice(rng.choice(some)))
    rows = [(scene, *asked) for scene, asked in seen.items()]
    return rows[:N_TEST] if split == "test" else rows[N_TEST:]


def get_shapes_rl_dataset(
    split: str = "train",
    *,
    seed: int = 0,
    subset: str | None = None,
    reader: ImageReader | None = None,
    **options: Any,
) -> RowDataset:
    """Return RL rows: an image in `images`, a question about it in `messages`, and `answer`, a word or a number.

    `seed` determines scenes, questions and the split, `subset` the kinds of questions; see `scenes`.
    """
    return rl_dataset(_rows(split, seed, subset, reader), f"shapes[{split}]", reader=reader, **_KEYS, **options)


def get_shapes_sft_dataset(
    split: str = "train",
    *,
    tokenizer: Any,
    seed: int = 0,
    subset: str | None = None,
    reader: ImageReader | None = None,
    **options: Any,
) -> RowDataset:
    """Return SFT rows: image and question, then the answer and an end token, which are trained."""
    options |= {"tokenizer": tokenizer, "reader": reader}
    return sft_dataset(_rows(split, seed, subset, reader), f"shapes[{split}]", **_KEYS, **options)


def _rows(split: str, seed: int, subset: str | None, reader: ImageReader | None) -> list[SourceRow]:
    if reader is None:
        raise DatasetError(
            "the dataset shapes has images; expected the checkpoint of a vision-language model, "
            "with a preprocessor_config.json"
        )
    return _draw_rows(split, seed, subset)


@lru_cache(maxsize=4)
def _draw_rows(split: str, seed: int, subset: str | None) -> list[SourceRow]:
    return [
        SourceRow(
            f"shapes[{split}] row {number}",
            {"question": f"<image>{question}", "answer": answer, "images": [scene.image()]},
        )
        for number, (scene, question, answer) in enumerate(scenes(split, seed, subset))
    ]
