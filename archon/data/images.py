"""From image files to pixels, and from one placeholder per image to one per merged patch.

The image processor of the checkpoint's `preprocessor_config.json` computes the pixels with PIL. They are computed once
and travel with the trajectory, so that generator and trainer use the same ones. Nothing is ever fetched: an image is a
file, bytes, base64 or a PIL image.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from archon.checkpoint.hf_reader import read_hf_config
from archon.checkpoint.hub import CONFIG_FILES, checkpoint_folder
from archon.data.whole_images import misses_rows
from archon.models.args.base import ImageFormat
from archon.models.spec import get_model_spec
from archon.models.vision.images import ProcessedImage
from archon.schema.errors import ConfigError, ImageError
from archon.schema.files import TOKENIZER_BYTES, read_limited, require_regular, shown_path

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

PROCESSOR_FILE = "preprocessor_config.json"
MAX_BYTES = 32 * 2**20
"""Maximum image file size in bytes."""
MAX_PIXELS = 64 * 2**20
"""Maximum pixels of an image before resizing; a small file may decode to far more (a decompression bomb)."""
MAX_ASPECT = 200
"""Maximum aspect ratio of an image, equal to the processor's."""
MODES = ("RGB", "RGBA", "L", "LA", "P", "PA", "1")
"""PIL modes that convert to RGB without loss of range."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Supported Pillow formats. Other formats are rare, and some, such as EPS, run another program on the file."""
ImageSource = Any
"""A path, bytes, a PIL image, base64 text, a data URL, or a mapping with `bytes` or `path`, as data sets have."""

_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


class ImageReader:
    """Image reader of a checkpoint's model.

    Args:
        path: checkpoint directory with a `preprocessor_config.json`.
        image_format: image format of the model; by default read from the config.

    Raises:
        ConfigError: a text model, a directory without a processor, another patch size, or Pillow is missing.
    """

    def __init__(self, path: str | os.PathLike[str], image_format: ImageFormat | None = None) -> None:
        _require_pillow()
        if image_format is None:
            config = read_hf_config(path)
            args = get_model_spec(config["model_type"]).model_args_class.from_hf_config(config)
            image_format = args.image_format
        if image_format is None:
            raise ConfigError(f"{os.fspath(path)}: it is a text model; expected a vision-language model")
        self.image_format = image_format
        self.processor = _load_processor(checkpoint_folder(path, CONFIG_FILES))
        for name in ("patch_size", "temporal_patch_size", "merge_size"):
            if getattr(self.processor, name, None) != getattr(image_format, name):
                raise ConfigError(
                    f"{os.fspath(path)}: {PROCESSOR_FILE} has {name} {getattr(self.processor, name, None)}, and the "
                    f"model's is {getattr(image_format, name)}; use the processor of this checkpoint"
                )
        if image_format.channels != 3:
            raise ConfigError(
                f"{os.fspath(path)}: the model's images have {image_format.channels} channels; archon makes images "
                "of red, green and blue"
            )

    def read(self, source: ImageSource) -> ProcessedImage:
        """Return the pixels of an image.

        Raises:
            ImageError: the image cannot be used; see `open_image`.
        """
        image = open_image(source)
        try:
            made = self.processor(images=[image], return_tensors="pt")
        except (ValueError, OSError) as error:
            raise ImageError(f"an image of {image.width} x {image.height} pixels: {_line(error)}") from error
        frames, height, width = made["image_grid_thw"][0].tolist()
        return ProcessedImage(made["pixel_values"].to(torch.float32), (frames, height, width))

    def expand(self, tokens: Sequence[int], images: Sequence[ProcessedImage]) -> list[int]:
        """Return `expand_placeholders` with this model's placeholder."""
        return expand_placeholders(tokens, images, self.image_format)


def expand_placeholders(
    tokens: Sequence[int], images: Sequence[ProcessedImage], image_format: ImageFormat
) -> list[int]:
    """Return prompt tokens with each image placeholder repeated once per image token.

    Raises:
        ImageError: the number of placeholders differs from the number of images.
    """
    placeholders = sum(token == image_format.token for token in tokens)
    if placeholders != len(images):
        raise ImageError(
            f"the prompt has {placeholders} image placeholders (token {image_format.token}) and {len(images)} "
            "images; expected one placeholder for each"
        )
    following = iter(images)
    expanded: list[int] = []
    for token in tokens:
        expanded += [token] * (n_rows(next(following), image_format) if token == image_format.token else 1)
    return expanded


def n_rows(image: ProcessedImage, image_format: ImageFormat) -> int:
    """Return the number of tokens of an image."""
    height, width = image.size
    return height * width // image_format.merge_size**2


def open_image(source: ImageSource) -> PILImage:
    """Return a source as a decoded RGB image; transparent areas become white.

    Raises:
        ImageError: a URL (never fetched); a missing, truncated or unknown file; an animation; too many bytes or pixels;
            too large an aspect ratio; or a mode that would lose range, such as 16 bits.
    """
    _require_pillow()
    from PIL import Image

    if isinstance(source, Image.Image):
        return _decoded(source, "a PIL image")
    data, name = _bytes_of(source)
    if not data:
        raise ImageError(f"{name} is empty; expected an image")
    if len(data) > MAX_BYTES:
        raise ImageError(f"{name} has {len(data):,} bytes; expected at most {MAX_BYTES:,}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about large images, which the limit here refuses
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name} has too many pixels for its size; expected at most {MAX_PIXELS:,}") from error
    except Image.UnidentifiedImageError as error:
        raise ImageError(f"{name} is no image of the formats {', '.join(FORMATS)}") from error
    except Exception as error:  # Pillow raises errors of any kind for a damaged file
        raise ImageError(f"{name} is truncated or damaged: {_line(error)}") from error
    decoded = _decoded(image, name)
    try:
        is_partial = misses_rows(data, image, decoded)
    except (zlib.error, OSError) as error:
        raise ImageError(f"{name} is truncated or damaged: {_line(error)}") from error
    if is_partial:
        raise ImageError(f"{name} has less data than its {image.width} x {image.height} pixels need; copy it again")
    return decoded


def _bytes_of(source: ImageSource) -> tuple[bytes, str]:
    """Return a source's file, and a name of it for messages."""
    if isinstance(source, dict):
        known = [source[key] for key in ("bytes", "path") if source.get(key) is not None]
        if not known:
            raise ImageError("the image is a mapping without bytes or path; expected one of them")
        return _bytes_of(known[0])
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source), f"an image of {len(source):,} bytes"
    if isinstance(source, os.PathLike):
        return _file(Path(source))
    if not isinstance(source, str):
        raise ImageError(
            f"the image is a {type(source).__name__}; expected a path, bytes, base64, a data URL or a PIL image"
        )
    if (match := _DATA_URL.match(source)) is not None:
        return _decode(source[match.end() :], "a data URL")
    if source[:5].lower() == "data:":
        raise ImageError(f"the data URL {source[:40]!r} is no image in base64; expected data:image/png;base64,…")
    if _URL.match(source) is not None:
        raise ImageError(f"{source[:80]!r} is a URL, which archon never fetches; send the image bytes in base64")
    if len(source) < 4096 and ("." in source or os.path.isfile(source)):  # base64 has no dot
        return _file(Path(source))
    return _decode(source, "a base64 image")


def _file(path: Path) -> tuple[bytes, str]:
    return read_limited(path, MAX_BYTES, ImageError), shown_path(path)


def _decode(text: str, name: str) -> tuple[bytes, str]:
    if len(text) > MAX_BYTES * 3 // 2:
        raise ImageError(f"{name} has {len(text):,} characters; expected an image of at most {MAX_BYTES:,} bytes")
    try:
        return base64.b64decode("".join(text.split()), validate=True), name
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"{name} is not base64: {_line(error)}") from error


def _decoded(image: PILImage, name: str) -> PILImage:
    """Return the RGB pixels of an opened image; the size is checked before decoding."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise ImageError(f"{name} has {width} x {height} pixels; expected at most {MAX_PIXELS:,} in total")
    if min(width, height) < 1 or max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageError(f"{name} has {width} x {height} pixels; expected sides of at most {MAX_ASPECT} to 1")
    if image.mode not in MODES:
        raise ImageError(f"{name} has the mode {image.mode}; expected {', '.join(MODES)}: convert it to RGB")
    try:
        frames = getattr(image, "n_frames", 1)
        decoded = _on_white(image) if frames == 1 else None
    except Exception as error:  # Pillow raises errors of any kind for a damaged file
        raise ImageError(f"{name} is truncated or damaged: {_line(error)}") from error
    if decoded is None:
        raise ImageError(f"{name} is an animation of {frames} frames; expected a single image")
    return decoded


def _on_white(image: PILImage) -> PILImage:
    from PIL import Image

    image.load()
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")


def _require_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise ConfigError("images need Pillow; install archon-engine[vision]") from None


def _load_processor(path: Path) -> Any:
    if not (path / PROCESSOR_FILE).is_file():
        raise ConfigError(f"{path} has no {PROCESSOR_FILE}, the image processor; copy the model's file")
    require_regular(path / PROCESSOR_FILE, TOKENIZER_BYTES)
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(
            str(path), backend="pil", local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise ConfigError(f"{path / PROCESSOR_FILE} cannot be used: {_line(error)}") from error


def _line(error: BaseException) -> str:
    """Return an error's message as one short line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
