"""Detection of image files with fewer rows than their header says. Pillow fills the missing rows with one color."""

from __future__ import annotations

import io
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by color type (PNG specification, section 11.2.2)
_PNG_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""First column, first row, and the steps of both in each pass of an interlaced image (section 8.2)."""
_STRIP_ROWS, _STRIP_OFFSETS, _PLANES = 278, 273, 284  # tags of TIFF
_FILLER = b"\x5a\xa5\x3c\x17" * 1024  # entropy-coded data of JPEG: without the byte 0xFF, which starts a marker


def misses_rows(data: bytes, opened: PILImage, decoded: PILImage) -> bool:
    """Return whether a file has less data than its pixels need.

    Args:
        data: the file.
        opened: the image as Pillow opened it, with its format and tags.
        decoded: its RGB pixels.

    Raises:
        zlib.error: the checksum of a PNG's data does not match.
    """
    match opened.format:
        case "PNG":
            return _png_misses_rows(data)
        case "JPEG":
            return _jpeg_misses_rows(data, decoded, is_progressive="progressive" in opened.info)
        case "TIFF":
            tags = opened.tag_v2  # type: ignore[attr-defined]
            strips = tags.get(_STRIP_OFFSETS)
            rows = tags.get(_STRIP_ROWS, opened.height)
            if strips is None or rows < 1:  # tiles, which Pillow checks
                return False
            planes = len(opened.getbands()) if tags.get(_PLANES, 1) == 2 else 1
            return len(strips) < planes * -(-opened.height // rows)
    return False


def _png_misses_rows(data: bytes) -> bool:
    """Inflate the pixels of a PNG, up to the size that its header states."""
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    bits, is_interlaced = data[24] * _PNG_CHANNELS[data[25]], data[28] == 1
    expected = 0
    for x, y, step_x, step_y in _PNG_PASSES if is_interlaced else ((0, 0, 1, 1),):
        columns, rows = -(-(width - x) // step_x), -(-(height - y) // step_y)
        if columns > 0 and rows > 0:
            expected += rows * (1 + -(-columns * bits // 8))  # each row starts with its filter
    inflate, place, size = zlib.decompressobj(), 8, 0
    while place + 8 <= len(data) and size < expected:
        length, kind = int.from_bytes(data[place : place + 4], "big"), data[place + 4 : place + 8]
        if kind == b"IDAT":
            pending = data[place + 8 : place + 8 + length]
            while pending and size < expected and not inflate.eof:
                size += len(inflate.decompress(pending, 2**20))
                pending = inflate.unconsumed_tail
        place += 12 + length
    return size + len(inflate.flush()) < expected


def _jpeg_misses_rows(data: bytes, decoded: PILImage, *, is_progressive: bool) -> bool:
    """Decode a JPEG again with extra data at its end; the pixels change only if data was missing.

    libjpeg fills missing data with the last color, or smooths it in a progressive image. Other images with several
    colors in their last corner are therefore complete and are not decoded again.
    """
    from PIL import Image

    width, height = decoded.size
    corner = decoded.crop((max(0, width - 4), max(0, height - 4), width, height))
    if not is_progressive and any(low != high for low, high in corner.getextrema()):  # type: ignore[misc]
        return False
    end = data.rfind(b"\xff\xd9")
    longer = Image.open(io.BytesIO(data[:end] + _FILLER + data[end:]), formats=("JPEG",))
    return longer.convert("RGB").tobytes() != decoded.tobytes()
