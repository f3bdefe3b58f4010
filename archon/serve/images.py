"""The pictures of a request: taken from its messages, and read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from archon.data.images import ImageReader
from archon.models.vision.images import ProcessedImage
from archon.schema.errors import RolloutError

SOURCE = "source"
"""The key of a picture's data URL in a part of a message, until `pop_image_sources`: no template reads it."""


def pop_image_sources(messages: Sequence[dict[str, Any]]) -> list[str]:
    """Remove the pictures of messages for a template from their parts, and returns them in their order."""
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [part.pop(SOURCE) for content in contents for part in content if SOURCE in part]


def read_images(sources: Sequence[str], reader: ImageReader | None) -> list[ProcessedImage]:
    """Return the pictures of a request. Raises `RolloutError` or `ImageError`, in one line, for one that cannot be
    used: nothing is fetched, and no file of this machine is read.
    """
    if sources and reader is None:
        raise RolloutError("the request has pictures, and this model sees none; send text")
    for source in sources:
        if source[:5].lower() != "data:":
            raise RolloutError(
                f"the image URL {source[:60]!r} is not fetched; send the picture itself: data:image/png;base64,…"
            )
    return [] if reader is None else [reader.read(source) for source in sources]
