"""Prompts of requests: text and images to tokens, within the context of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from archon.data.encoding import encode_prompt, tokenize
from archon.data.images import ImageReader, n_rows
from archon.models.vision.images import ProcessedImage
from archon.schema.errors import ContextOverflowError
from archon.serve.images import read_images


@dataclass
class Prompts:
    """Prompts of one request in tokens, and the images of the first."""

    tokens: list[list[int]]
    images: list[ProcessedImage] = field(default_factory=list)


@dataclass
class PromptReader:
    """Reads prompts; one that cannot fit the context is refused before the work that it would take.

    Args:
        tokenizer: tokenizer of the model.
        image_reader: image reader; None for a text model.
        max_tokens: maximum tokens of prompt and answer; None: unknown.
    """

    tokenizer: Any
    image_reader: ImageReader | None = None
    max_tokens: int | None = None

    def tokenize(self, text: str, where: str) -> list[int]:
        """Return the tokens of a text, without special tokens."""
        self._check_length(text, where)
        return list(tokenize(self.tokenizer, text, where)["input_ids"])

    def encode_prompt(self, text: str, where: str) -> list[int]:
        """Return the tokens of a whole prompt, which starts with the tokenizer's special tokens."""
        self._check_length(text, where)
        return encode_prompt(self.tokenizer, {"prompt": text})

    def read_images(self, sources: Sequence[str]) -> list[ProcessedImage]:
        """Return the images of a request; raises as `images.read_images` does."""
        images: list[ProcessedImage] = []
        count = 0
        for number, source in enumerate(sources, 1):
            images += read_images([source], self.image_reader)
            if self.image_reader is not None and self.max_tokens is not None:
                count += n_rows(images[-1], self.image_reader.image_format)
                if count > self.max_tokens:
                    raise ContextOverflowError(
                        f"the first {number} of {len(sources)} images have {count:,} tokens; expected fewer than the "
                        f"context of {self.max_tokens:,}: send smaller or fewer images"
                    )
        return images

    def _check_length(self, text: str, where: str) -> None:
        if self.max_tokens is not None and len(text) > self.max_tokens * self._longest_token:
            raise ContextOverflowError(
                f"{where}: the text has {len(text):,} characters; the context of {self.max_tokens:,} tokens holds at "
                f"most {self.max_tokens * self._longest_token:,}: shorten it"
            )

    @cached_property
    def _longest_token(self) -> int:
        """Maximum characters of a token; a byte of a character counts one."""
        return max(map(len, self.tokenizer.get_vocab()))
