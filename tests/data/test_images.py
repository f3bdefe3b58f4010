"""Pictures of any form become the pixels of transformers' processor; what cannot be used is refused in one line."""

from __future__ import annotations

import base64
import io
import json
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw
from transformers import AutoImageProcessor

from archon.data import images
from archon.data.images import FORMATS, ImageReader, expand_placeholders, n_rows, open_image
from archon.models.args.base import ImageFormat
from archon.schema.errors import ConfigError, ImageError
from tests.models.test_vision import IMAGE, random_fields

SIZES = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 64, "longest_edge": 64 * 64},
    **SIZES,
}


def drawn(width: int = 37, height: int = 21, mode: str = "RGB") -> Image.Image:
    image = Image.new("RGB", (width, height), (250, 240, 230))
    draw = ImageDraw.Draw(image)
    draw.ellipse((2, 2, width // 2, height - 3), fill=(200, 20, 30))
    draw.rectangle((width // 2, 3, width - 4, height - 5), fill=(10, 60, 220))
    return image.convert(mode)


def png(image: Image.Image, form: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sees")
    fields = random_fields(0, "qwen3_5")
    fields["vision_config"] |= {
        "in_channels": 3,
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


@pytest.fixture(scope="module")
def reader(checkpoint: Path) -> ImageReader:
    return ImageReader(checkpoint)


def test_pixels_are_those_of_transformers_processor_in_every_form(
    reader: ImageReader, checkpoint: Path, tmp_path: Path
) -> None:
    image = drawn()
    theirs = AutoImageProcessor.from_pretrained(checkpoint, backend="pil")(images=[image], return_tensors="pt")
    data = png(image)
    (tmp_path / "a.png").write_bytes(data)
    text = base64.b64encode(data).decode()
    forms: list[Any] = [
        image,
        data,
        tmp_path / "a.png",
        str(tmp_path / "a.png"),
        text,
        f"data:image/png;base64,{text}",
        {"bytes": data, "path": None},
        {"bytes": None, "path": str(tmp_path / "a.png")},
    ]
    for form in forms:
        picture = reader.read(form)
        assert torch.equal(picture.pixel_values, theirs["pixel_values"])
        assert picture.grid == tuple(theirs["image_grid_thw"][0].tolist())
        assert picture.pixel_values.dtype == torch.float32 and picture.digest == reader.read(image).digest
    assert reader.read(drawn(38)).digest != reader.read(image).digest


@pytest.mark.parametrize("mode", ["RGBA", "L", "LA", "P", "1"])
def test_modes_without_loss_become_rgb(reader: ImageReader, mode: str) -> None:
    assert reader.read(drawn(mode=mode)).pixel_values.shape[1] == reader.image_format.features


def test_what_is_transparent_is_on_white() -> None:
    image = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert open_image(image).getpixel((3, 3)) == (255, 255, 255)


def test_placeholders_become_one_for_each_merged_patch(reader: ImageReader) -> None:
    image, own = reader.image_format, [reader.read(drawn()), reader.read(drawn(64, 16))]
    tokens = reader.expand([1, IMAGE, 2, IMAGE, 3], own)
    first, second = (n_rows(picture, image) for picture in own)
    assert tokens == [1, *[IMAGE] * first, 2, *[IMAGE] * second, 3] and first != second
    assert expand_placeholders([1, 2], [], image) == [1, 2]
    for wrong in ([1, IMAGE], [IMAGE, IMAGE, IMAGE]):
        with pytest.raises(ImageError, match=f"has {wrong.count(IMAGE)} image placeholders .* and 2 images"):
            reader.expand(wrong, own)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a hundred bytes that says it has this many pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0")), (b"IEND", b"")]
    parts = [struct.pack(">I", len(d)) + name + d + struct.pack(">I", zlib.crc32(name + d)) for name, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def frames() -> bytes:
    file = io.BytesIO()
    drawn().save(file, "GIF", save_all=True, append_images=[drawn(37, 21).rotate(90)])
    return file.getvalue()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("https://example.com/a.png", "is a URL, which archon never fetches"),
        ("file:///etc/passwd", "is a URL, which archon never fetches"),
        ("data:text/plain,hello", "is no image in base64"),
        ("data:image/png;base64,%%%", "a data URL is not base64"),
        ("no-such-file.png", "cannot be read: No such file"),
        ("AAAA", "is no image of the formats PNG, JPEG"),
        (b"", "is empty"),
        (b"GIF89a", "is no image of the formats PNG, JPEG"),
        (png(drawn())[:-60], "is truncated or damaged"),
        (png(drawn(), "JPEG")[:-200], "is truncated or damaged"),
        (bomb(60_000, 60_000), "too many pixels for its size; expected at most"),
        (bomb(9000, 9000), "9000 x 9000 pixels; expected at most"),
        (png(drawn().resize((804, 4))), "804 x 4 pixels; expected sides of at most 200 to 1"),
        (frames(), "an animation of 2 frames"),
        (frames()[:170], "is truncated or damaged"),
        (png(drawn(), "EPS"), "is no image of the formats"),
        (drawn().convert("I;16"), "has the mode I;16; expected RGB"),
        (drawn().convert("CMYK"), "has the mode CMYK; expected RGB"),
        ({"bytes": None}, "without bytes or path"),
        (7, "the image is a int; expected a path"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(reader: ImageReader, source: Any, message: str) -> None:
    with pytest.raises(ImageError, match=message) as caught:
        reader.read(source)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def refusal(data: bytes) -> str:
    """What is said of a file; empty for one that is read."""
    try:
        assert open_image(data).mode == "RGB"
    except ImageError as error:
        return str(error)
    return ""


@pytest.mark.filterwarnings("ignore:::PIL")
@pytest.mark.parametrize("form", [*FORMATS, "animation"])
def test_files_that_are_cut_or_have_wrong_bytes_are_read_or_refused_in_one_line(form: str) -> None:
    whole, rng = frames() if form == "animation" else png(drawn(), form), random.Random(0)
    cut = [refusal(whole[:length]) for length in range(0, len(whole), max(1, len(whole) // 300))]
    assert sum(map(bool, cut)) > 150
    changed = []
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 2, 9])):
            data[rng.randrange(min(len(data), rng.choice([64, 400, len(data)])))] = rng.randrange(256)
        changed.append(refusal(bytes(data)))
    assert any(changed)
    assert all("\n" not in said and len(said) < 400 for said in cut + changed)


def test_files_of_too_many_bytes_are_refused_before_they_are_read(
    reader: ImageReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "MAX_BYTES", 40)
    (tmp_path / "a.png").write_bytes(png(drawn()))
    for source in (tmp_path / "a.png", png(drawn()), base64.b64encode(png(drawn())).decode()):
        with pytest.raises(ImageError, match=r"expected .*at most 40"):
            reader.read(source)


def test_a_folder_that_says_nothing_of_pictures_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"has no preprocessor_config\.json"):
        ImageReader(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | {"merge_size": 1}))
    with pytest.raises(ConfigError, match="has merge_size 1, and the model's is 2"):
        ImageReader(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Unheard"}))
    with pytest.raises(ConfigError, match="cannot be used"):
        ImageReader(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    with pytest.raises(ConfigError, match="makes images of red, green and blue"):
        ImageReader(tmp_path, ImageFormat(IMAGE, 2, 1, 2, 4))
    text = random_fields(0, "qwen3_5")["text_config"] | {"model_type": "qwen3_5_text"}
    (tmp_path / "config.json").write_text(json.dumps(text))
    with pytest.raises(ConfigError, match="it is a text model"):
        ImageReader(tmp_path)
