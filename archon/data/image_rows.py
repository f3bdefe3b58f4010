"""Rows with pictures: their places in a conversation, and in the tokens of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from archon.checkpoint.hf_reader import checkpoint_folder, read_hf_config
from archon.data.encoding import Message, encode_prompt, has_chat_template
from archon.data.images import PROCESSOR_FILE, ImageReader, open_image
from archon.models import get_model_spec
from archon.models.vision.images import ProcessedImage
from archon.schema.config import EngineConfig
from archon.schema.errors import DatasetError, ImageError

IMAGE = "<image>"
"""Where a picture stands in a text."""


def open_reader(model: EngineConfig | str | Path) -> ImageReader | None:
    """Return what reads pictures for a model, of an engine or in a folder; None for one of text, or without an image
    processor.
    """
    path = checkpoint_folder(model.path if isinstance(model, EngineConfig) else model)
    if (isinstance(model, EngineConfig) and model.vision == "off") or not (path / PROCESSOR_FILE).is_file():
        return None
    config = read_hf_config(path)
    image_format = get_model_spec(config["model_type"]).model_args_class.from_hf_config(config).image_format
    return None if image_format is None else ImageReader(path, image_format)


def image_sources(row: Mapping[str, Any]) -> list[Any]:
    """Return the pictures of a row, as `ImageReader.read` takes them: its column `images`, or `image_format`."""
    images = next((row[name] for name in ("images", "image") if row.get(name) is not None), None)
    if images is None:
        return []
    return [*images] if isinstance(images, list | tuple) else [images]


def insert_image_parts(messages: Sequence[Message], count: int, where: str) -> list[Message]:
    """Return a conversation whose contents have parts, as chat templates expect them, with `count` pictures where the
    texts have `<image_format>`, or before the first text of the user where none has.

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


def require_image_template(tokenizer: Any, where: str) -> None:
    """Raise DatasetError unless the tokenizer has a chat template, which alone says where a picture stands."""
    if not has_chat_template(tokenizer):
        raise DatasetError(
            f"{where}: it has pictures, and the tokenizer has no chat template, which says how a picture is written"
        )


def encode_image_prompt(
    tokenizer: Any, row: Mapping[str, Any], reader: ImageReader | None, **options: Any
) -> tuple[list[int], list[ProcessedImage]]:
    """Return the tokens of an RL row's prompt, with a placeholder for each row of a picture, and its pictures.

    Raises DatasetError or ImageError, in one line, for pictures that cannot be used, or that the prompt has no place
    for.
    """
    sources = image_sources(row)
    if sources and "messages" in row:
        require_image_template(tokenizer, "this row")
    tokens = encode_prompt(tokenizer, dict(row), **options)
    if reader is None:
        if sources:
            raise ImageError(f"the row has {len(sources)} pictures, and nothing to read them with")
        return tokens, []
    images = [reader.read(source) for source in sources]
    return reader.expand(tokens, images), images


class SFTExpander:
    """Repeats the placeholders of SFT rows for each row of their pictures.

    Every picture is opened, which finds those that cannot be used, and one of each size is read: the number of its rows
    depends on its size alone. Pixels are made where a row is trained on, as they take far more memory than files.
    """

    def __init__(self, reader: ImageReader) -> None:
        self.reader = reader
        self._read: dict[tuple[int, int], ProcessedImage] = {}

    def expand(self, row: dict[str, Any], sources: Sequence[Any], where: str) -> dict[str, Any]:
        """Return an SFT row with its placeholders repeated, and its pictures as they came in `images`.

        Raises DatasetError, naming `where`, for a picture that cannot be used, and another number of placeholders.
        """
        try:
            images = [self._image_of_size(source) for source in sources]
            ids = self.reader.expand(row["input_ids"], images)
        except ImageError as error:
            raise DatasetError(f"{where}: {error}") from None
        image_format = self.reader.image_format
        counts = iter([len(image.pixel_values) // image_format.merge_size**2 for image in images])
        mask: list[int] = []
        for token, trained in zip(row["input_ids"], row["loss_mask"], strict=True):
            mask += [trained] * (next(counts) if token == image_format.token else 1)
        return {"input_ids": ids, "loss_mask": mask, "images": [*sources]}

    def _image_of_size(self, source: Any) -> ProcessedImage:
        opened = open_image(source)
        if opened.size not in self._read:
            self._read[opened.size] = self.reader.read(opened)
        return self._read[opened.size]
