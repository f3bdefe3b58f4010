"""The contents of messages that clients send: texts and pictures, in the forms of the protocols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from archon.serve.images import SOURCE
from archon.serve.protocol import RequestModel, TextPart, content_text


class ImageUrl(RequestModel):
    url: str = Field(description="data:image/png;base64,…; other URLs are not fetched")
    detail: Literal["auto", "low", "high"] | None = Field(None, description="without effect")


class ImageUrlPart(RequestModel):
    """A picture of OpenAI's chat completions."""

    type: Literal["image_url"]
    image_url: ImageUrl

    @property
    def url(self) -> str:
        return self.image_url.url


class InputImagePart(RequestModel):
    """A picture of OpenAI's responses."""

    type: Literal["input_image"]
    image_url: str = Field(description="data:image/png;base64,…; other URLs are not fetched")
    detail: Literal["auto", "low", "high", "original"] | None = Field(None, description="without effect")

    @property
    def url(self) -> str:
        return self.image_url


class ImageSource(RequestModel):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str

    @property
    def url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(RequestModel):
    """A picture elsewhere, which is refused with the reason."""

    type: Literal["url"]
    url: str = Field(description="not fetched: send the picture itself, with a source of type base64")


class ImageBlock(RequestModel):
    """A picture of Anthropic's messages."""

    type: Literal["image"]
    source: Annotated[ImageSource | UrlSource, Field(discriminator="type")]
    cache_control: dict[str, Any] | None = None

    @property
    def url(self) -> str:
        return self.source.url


MultimodalPart = Annotated[TextPart | ImageUrlPart | InputImagePart, Field(discriminator="type")]
MultimodalContent = str | list[MultimodalPart]
"""A content of OpenAI's protocols with pictures."""


def template_content(
    content: str | Sequence[TextPart | ImageUrlPart | InputImagePart | ImageBlock] | None,
) -> str | list[dict[str, Any]]:
    """Return a content as chat templates expect it: one string, or with pictures a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part for part in content if isinstance(part, TextPart)]
    if len(texts) == len(content):
        return content_text(texts)
    return [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image", SOURCE: part.url}
        for part in content
    ]
