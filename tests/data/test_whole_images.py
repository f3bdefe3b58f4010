"""An image of whose rows a part has no data is refused, and a whole one never is."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from archon.data.images import open_image
from archon.schema.errors import ImageError

MISSES = "has less data than its .* pixels need; copy it again"


def noise(height: int, width: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(image: Image.Image, form: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png_of(height: int, data: bytes, interlaced: bool = False) -> bytes:
    """A PNG of 100 columns with this data."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 100, height, 8, 2, 0, 0, int(interlaced))
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("height", "rows"), [(8000, 1), (8000, 7999), (3, 2)])
def test_a_png_with_some_of_its_rows_is_refused(height, rows):
    with pytest.raises(ImageError, match=MISSES):
        open_image(png_of(height, (b"\0" + b"\7" * 300) * rows))


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_rows": 1}, {"subsampling": 0}])
def test_a_jpeg_whose_data_ends_early_is_refused(options):
    content = encoded(noise(400, 300), "JPEG", **options)
    for part in (0.05, 0.5) if "progressive" not in options else (0.03,):
        with pytest.raises(ImageError, match=MISSES):
            open_image(content[: int(len(content) * part)] + b"\xff\xd9")


def test_a_tiff_without_some_of_its_strips_is_refused():
    content = encoded(noise(40, 30), "TIFF")
    place = content.index(struct.pack("<HH", 278, 4))
    rows = struct.pack("<HHII", 278, 4, 1, 10)
    with pytest.raises(ImageError, match=MISSES):
        open_image(content[:place] + rows + content[place + 12 :])


@pytest.mark.parametrize("content", ["noise", "white", "white corner"])
@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("PNG", {}),
        ("PNG", {"mode": "1"}),
        ("PNG", {"mode": "P"}),
        ("PNG", {"mode": "LA"}),
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("JPEG", {"mode": "L"}),
        ("JPEG", {"restart_marker_rows": 1}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("WEBP", {}),
        ("GIF", {}),
        ("BMP", {}),
        ("PPM", {}),
    ],
)
def test_a_whole_image_is_read(content, form, options):
    options = dict(options)
    image = noise(67, 45)
    if content != "noise":
        image.paste((255, 255, 255), (0, 0, 45, 67) if content == "white" else (20, 30, 45, 67))
    image = image.convert(options.pop("mode", "RGB"))
    assert open_image(encoded(image, form, **options)).size == (45, 67)


def test_an_interlaced_png_of_any_size_is_whole():
    first = [(0, 0), (4, 0), (0, 4), (2, 0), (0, 2), (1, 0), (0, 1)]
    steps = [(8, 8), (8, 8), (4, 8), (4, 4), (2, 4), (2, 2), (1, 2)]
    for height in range(1, 18):
        data = b""
        for (x, y), (step_x, step_y) in zip(first, steps, strict=True):
            columns = len(range(x, 100, step_x))
            data += (b"\0" + b"\7" * 3 * columns) * len(range(y, height, step_y))
        assert open_image(png_of(height, data, interlaced=True)).size == (100, height)
        with pytest.raises(ImageError, match=f"{MISSES}|truncated or damaged"):
            open_image(png_of(height, data[:-1], interlaced=True))
