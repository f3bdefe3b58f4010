"""Images as files for human inspection, reconstructed from the pixels of the model input."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import torch

from archon.data.images import ImageReader
from archon.models.vision.images import ProcessedImage

LARGEST_SIDE = 384
"""Maximum pixels of a written image's longer side."""


def as_png(image: ProcessedImage, reader: ImageReader) -> bytes:
    """Return PNG bytes of a model input image, downscaled if it is large."""
    from PIL import Image

    image_format, (height, width) = reader.image_format, image.size
    merge, side = image_format.merge_size, image_format.patch_size
    patches = image.pixel_values.view(
        height // merge,
        width // merge,
        merge,
        merge,
        image_format.channels,
        image_format.temporal_patch_size,
        side,
        side,
    )[..., 0, :, :]
    # Rows and columns of squares, of patches in a square, and of pixels in a patch.
    pixels = patches.permute(0, 2, 5, 1, 3, 6, 4).reshape(height * side, width * side, image_format.channels)
    mean, deviation = (torch.tensor(getattr(reader.processor, name)) for name in ("image_mean", "image_std"))
    colors = ((pixels * deviation + mean) * 255).round().clamp(0, 255).to(torch.uint8)
    made = Image.fromarray(colors.numpy())
    made.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    file = io.BytesIO()
    made.save(file, "PNG")
    return file.getvalue()


def save_images(folder: Path, reader: ImageReader, images: Sequence[ProcessedImage]) -> list[str]:
    """Write each distinct image to a folder once, and return the file names."""
    names = []
    for image in images:
        name = f"{image.digest[:16]}.png"
        if not (folder / name).exists():
            folder.mkdir(exist_ok=True)
            (folder / name).write_bytes(as_png(image, reader))
        names.append(name)
    return names
