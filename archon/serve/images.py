"""Images of a request: collected from its messages, and read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from archon.data.images import ImageReader
from archon.models.vision.images import ProcessedImage
from archon.schema.errors import RolloutError

SOURCE = "source"
"""Key of an image's data URL in a message part until `pop_image_sources`; templates do not read it."""


def pop_image_sources(messages: Sequence[dict[str, Any]]) -> list[str]:
    """Remove the images from message parts and return them in order."""
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [part.pop(SOURCE) for content in contents for part in content if SOURCE in part]


def read_images(sources: Sequence[str], reader: ImageReader | None) -> list[ProcessedImage]:
    """Return the images of a request. Nothing is fetched, and no local file is read.

    Raises:
        RolloutError, ImageError: an image cannot be used.
    """
    if sources and reader is None:
        raise RolloutError("the request has images, but this is a text model; send text")
    for source in sources:
        if source[:5].lower() != "data:":
            raise RolloutError(
                f"the image URL {source[:60]!r} is not fetched; send the image itself: data:image/png;base64,…"
            )
    return [] if reader is None else [reader.read(source) for source in sources]
