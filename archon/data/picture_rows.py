"""Rows with pictures: their places in a conversation, and in the tokens of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from archon.checkpoint.hf_reader import checkpoint_folder, read_hf_config
from archon.data.encoding import Message, encode_prompt, has_chat_template
from archon.data.pictures import PROCESSOR_FILE, PictureReader, open_image
from archon.models import get_model_spec
from archon.models.vision.images import Picture
from archon.schema.config import EngineConfig
from archon.schema.errors import DatasetError, PictureError

IMAGE = "<image>"
"""Where a picture stands in a text."""


def open_reader(model: EngineConfig | str | Path) -> PictureReader | None:
    """Returns what reads pictures for a model, of an engine or in a folder; None for one of text, or without an image
    processor."""
    path = checkpoint_folder(model.path if isinstance(model, EngineConfig) else model)
    if (isinstance(model, EngineConfig) and model.vision == "off") or not (path / PROCESSOR_FILE).is_file():
        return None
    config = read_hf_config(path)
    image = get_model_spec(config["model_type"]).model_args_class.from_hf_config(config).image_format
    return None if image is None else PictureReader(path, image)


def sources_of(row: Mapping[str, Any]) -> list[Any]:
    """Returns the pictures of a row, as `PictureReader.read` takes them: its column `images`, or `image`."""
    images = next((row[name] for name in ("images", "image") if row.get(name) is not None), None)
    if images is None:
        return []
    return [*images] if isinstance(images, list | tuple) else [images]


def with_pictures(messages: Sequence[Message], count: int, where: str) -> list[Message]:
    """Returns a conversation whose contents have parts, as chat templates expect them, with `count` pictures where the
    texts have `<image>`, or before the first text of the user where none has.

    Raises DatasetError, naming `where`, for another number of places.
    """
    places = sum(message["content"].count(IMAGE) for message in messages)
    if places not in (0, count):
        raise DatasetError(f"{where}: the text has {places} places of pictures ({IMAGE}) and {count} pictures")
    first = next((message for message in messages if message["role"] == "user"), messages[0])
    pictured = []
    for message in messages:
        text = message["content"]
        if not places and message is first:
            text = IMAGE * count + text
        pictured.append({**message, "content": _parts(text) if IMAGE in text else text})
    return pictured


def _parts(text: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(IMAGE)):
        if number:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def require_places(tokenizer: Any, where: str) -> None:
    """Raise DatasetError unless the tokenizer has a chat template, which alone says where a picture stands."""
    if not has_chat_template(tokenizer):
        raise DatasetError(
            f"{where}: it has pictures, and the tokenizer has no chat template, which says how a picture is written"
        )


def encode_pictured(
    tokenizer: Any, row: Mapping[str, Any], reader: PictureReader | None, **options: Any
) -> tuple[list[int], list[Picture]]:
    """Returns the tokens of an RL row's prompt, with a placeholder for each row of a picture, and its pictures.

    Raises DatasetError or PictureError, in one line, for pictures that cannot be used, or that the prompt has no place
    for.
    """
    sources = sources_of(row)
    if sources and "messages" in row:
        require_places(tokenizer, "this row")
    tokens = encode_prompt(tokenizer, dict(row), **options)
    if reader is None:
        if sources:
            raise PictureError(f"the row has {len(sources)} pictures, and nothing to read them with")
        return tokens, []
    pictures = [reader.read(source) for source in sources]
    return reader.expand(tokens, pictures), pictures


class SFTExpander:
    """Repeats the placeholders of SFT rows for each row of their pictures.

    Every picture is opened, which finds those that cannot be used, and one of each size is read: the number of its rows
    depends on its size alone. Pixels are made where a row is trained on, as they take far more memory than files.
    """

    def __init__(self, reader: PictureReader) -> None:
        self.reader = reader
        self._read: dict[tuple[int, int], Picture] = {}

    def expand(self, row: dict[str, Any], sources: Sequence[Any], where: str) -> dict[str, Any]:
        """Returns an SFT row with its placeholders repeated, and its pictures as they came in `images`.

        Raises DatasetError, naming `where`, for a picture that cannot be used, and another number of placeholders.
        """
        try:
            pictures = [self._of_same_size(source) for source in sources]
            ids = self.reader.expand(row["input_ids"], pictures)
        except PictureError as error:
            raise DatasetError(f"{where}: {error}") from None
        image = self.reader.image_format
        counts = iter([len(picture.pixel_values) // image.merge_size**2 for picture in pictures])
        mask: list[int] = []
        for token, trained in zip(row["input_ids"], row["loss_mask"], strict=True):
            mask += [trained] * (next(counts) if token == image.token else 1)
        return {"input_ids": ids, "loss_mask": mask, "images": [*sources]}

    def _of_same_size(self, source: Any) -> Picture:
        opened = open_image(source)
        if opened.size not in self._read:
            self._read[opened.size] = self.reader.read(opened)
        return self._read[opened.size]
