"""Rows with images: image positions in conversations and in the tokens of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from archon.checkpoint.chat_template import Message, has_chat_template
from archon.checkpoint.hf_reader import read_hf_config
from archon.checkpoint.hub import CONFIG_FILES, checkpoint_folder
from archon.data.encoding import encode_prompt
from archon.data.images import PROCESSOR_FILE, ImageReader, open_image
from archon.models import get_model_spec
from archon.models.vision.images import ProcessedImage
from archon.schema.config import EngineConfig
from archon.schema.errors import DatasetError, ImageError

IMAGE = "<image>"
"""Image placeholder in text."""


def open_reader(model: EngineConfig | str | Path) -> ImageReader | None:
    """Return the image reader of a model in an engine or a directory.

    None for a text model or without an image processor.
    """
    path = checkpoint_folder(model.path if isinstance(model, EngineConfig) else model, CONFIG_FILES)
    if (isinstance(model, EngineConfig) and model.vision == "off") or not (path / PROCESSOR_FILE).is_file():
        return None
    config = read_hf_config(path)
    image_format = get_model_spec(config["model_type"]).model_args_class.from_hf_config(config).image_format
    return None if image_format is None else ImageReader(path, image_format)


def image_sources(row: Mapping[str, Any]) -> list[Any]:
    """Return the images of a row for `ImageReader.read`: its column `images`, or `image`."""
    images = next((row[name] for name in ("images", "image") if row.get(name) is not None), None)
    if images is None:
        return []
    return [*images] if isinstance(images, list | tuple) else [images]


def insert_image_parts(messages: Sequence[Message], count: int, where: str) -> list[Message]:
    """Return a conversation with content parts, as chat templates expect, with `count` images.

    Images replace `<image>` in the texts, or precede the first user text if no text has a placeholder.

    Raises:
        DatasetError: the number of placeholders differs; names `where`.
    """
    places = sum(message["content"].count(IMAGE) for message in messages)
    if places not in (0, count):
        raise DatasetError(f"{where}: {places} image placeholders ({IMAGE}) in the text, but {count} images")
    first = next((message for message in messages if message["role"] == "user"), messages[0])
    with_images = []
    for message in messages:
        text = message["content"]
        if not places and message is first:
            text = IMAGE * count + text
        with_images.append({**message, "content": _parts(text) if IMAGE in text else text})
    return with_images


def _parts(text: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(IMAGE)):
        if number:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def require_image_template(tokenizer: Any, where: str) -> None:
    """Raise DatasetError unless the tokenizer has a chat template, which defines the image placeholder."""
    if not has_chat_template(tokenizer):
        raise DatasetError(
            f"{where}: it has images, but the tokenizer has no chat template, which defines their placeholder"
        )


def encode_image_prompt(
    tokenizer: Any, row: Mapping[str, Any], reader: ImageReader | None, **options: Any
) -> tuple[list[int], list[ProcessedImage]]:
    """Return the prompt tokens of an RL row, with one placeholder per image token, and its images.

    Raises:
        DatasetError, ImageError: an image cannot be used, or the prompt has no placeholder for it.
    """
    sources = image_sources(row)
    if sources and "messages" in row:
        require_image_template(tokenizer, "this row")
    tokens = encode_prompt(tokenizer, row, **options)
    if reader is None:
        if sources:
            raise ImageError(f"the row has {len(sources)} images, but the model has no image reader")
        return tokens, []
    images = [reader.read(source) for source in sources]
    return reader.expand(tokens, images), images


class SFTExpander:
    """Expands the image placeholders of SFT rows to one per image token.

    Every image is opened, to detect unusable ones, but only one of each size is processed, because the number of tokens
    depends only on the size. Pixels are computed when a row is trained, because they take far more memory than files.
    """

    def __init__(self, reader: ImageReader) -> None:
        self.reader = reader
        self._read: dict[tuple[int, int], ProcessedImage] = {}

    def expand(self, row: dict[str, Any], sources: Sequence[Any], where: str) -> dict[str, Any]:
        """Return an SFT row with expanded placeholders, and its unprocessed images in `images`.

        Raises:
            DatasetError: an image cannot be used, or the number of placeholders differs; names `where`.
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
