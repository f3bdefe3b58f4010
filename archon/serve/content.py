"""Message contents from clients: text and images, in the formats of the protocols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from archon.serve.images import SOURCE
from archon.serve.protocol import RequestModel, TextPart, content_text


class ImageUrl(RequestModel):
    """An image URL."""

    url: str = Field(description="data:image/png;base64,…; other URLs are not fetched")
    detail: Literal["auto", "low", "high"] | None = Field(None, description="without effect")


class ImageUrlPart(RequestModel):
    """An image in OpenAI's chat completions."""

    type: Literal["image_url"]
    image_url: ImageUrl

    @property
    def url(self) -> str:
        """URL of the image."""
        return self.image_url.url


class InputImagePart(RequestModel):
    """An image in OpenAI's responses."""

    type: Literal["input_image"]
    image_url: str = Field(description="data:image/png;base64,…; other URLs are not fetched")
    detail: Literal["auto", "low", "high", "original"] | None = Field(None, description="without effect")

    @property
    def url(self) -> str:
        """URL of the image."""
        return self.image_url


class ImageSource(RequestModel):
    """A base64 image."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str

    @property
    def url(self) -> str:
        """URL of the image."""
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(RequestModel):
    """An image by URL, refused with the reason."""

    type: Literal["url"]
    url: str = Field(description="not fetched: send the image itself, with a source of type base64")


class ImageBlock(RequestModel):
    """An image in Anthropic's messages."""

    type: Literal["image"]
    source: Annotated[ImageSource | UrlSource, Field(discriminator="type")]
    cache_control: dict[str, Any] | None = None

    @property
    def url(self) -> str:
        """URL of the image."""
        return self.source.url


MultimodalPart = Annotated[TextPart | ImageUrlPart | InputImagePart, Field(discriminator="type")]
MultimodalContent = str | Annotated[list[MultimodalPart], Field(fail_fast=True)]
"""A content of OpenAI's protocols with images."""


def template_content(
    content: str | Sequence[TextPart | ImageUrlPart | InputImagePart | ImageBlock] | None,
) -> str | list[dict[str, Any]]:
    """Return a content as chat templates expect it: one string, or a list of parts with images."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part for part in content if isinstance(part, TextPart)]
    if len(texts) == len(content):
        return content_text(texts)
    return [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image", SOURCE: part.url}
        for part in content
    ]
