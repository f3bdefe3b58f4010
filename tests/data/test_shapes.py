"""The drawn pictures: splits without overlap, right answers, and rows with pictures of every form."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from archon.checkpoint.tokenizer import load_tokenizer
from archon.data.image_datasets import get_clevr_count_70k_sft_dataset, get_geometry3k_rl_dataset
from archon.data.image_files import as_png, save_images
from archon.data.image_rows import encode_image_prompt, image_sources
from archon.data.images import ImageReader
from archon.data.registry import get_custom_dataset
from archon.data.shapes import CELL, COLORS, SIDE, Scene, scenes
from archon.rl.bootstrap import write_blank
from archon.schema.errors import DatasetError, ImageError
from archon.training.config import BootstrapConfig
from tests.small_vision import RECIPE, SMALL_VISION

PNG = Scene((("red", "square"), None, None, None, ("blue", "circle"), None, None, None, ("red", "circle"))).image()


@pytest.fixture(scope="module")
def blank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sight")
    write_blank(BootstrapConfig(model_type="qwen3_5", hf_config=SMALL_VISION, tokenizer=RECIPE), folder)
    return folder


def test_scenes_are_the_same_for_a_seed_and_none_is_in_both_splits() -> None:
    train, test = scenes("train", 1), scenes("test", 1)
    assert train == scenes("train", 1) != scenes("train", 2)
    shown = [scene for scene, _, _ in [*train, *test]]
    assert len({*shown}) == len(shown) == 4400


def test_a_question_has_the_answer_that_the_pixels_have() -> None:
    for scene, question, answer in scenes("test"):
        image = Image.open(io.BytesIO(scene.image()))
        centers = [(place % SIDE * CELL + CELL // 2, place // SIDE * CELL + CELL // 2) for place in range(SIDE**2)]
        seen = [image.getpixel(center) for center in centers]
        if question.startswith("how many"):
            assert answer == str(seen.count(COLORS[question.split()[2].rstrip("?")]))
        elif question.startswith("where"):
            columns = {place % SIDE for place, color in enumerate(seen) if color == COLORS[question.split()[2][:-1]]}
            assert [answer] == [("left", "middle", "right")[column] for column in columns]
        else:
            assert COLORS[answer] in seen


@pytest.mark.parametrize(
    ("subset", "asked"), [("count", {"how"}), ("color+count", {"how", "color"}), ("place", {"where"})]
)
def test_a_subset_has_questions_of_its_kinds_alone(blank: Path, subset: str, asked: set[str]) -> None:
    rows = scenes("test", 0, subset)
    assert {question.split()[0] for _, question, _ in rows} == asked
    train = {scene for scene, _, _ in scenes("train", 0, subset)}
    assert len(rows) == 400 and train.isdisjoint(scene for scene, _, _ in rows)
    loaded = get_custom_dataset("shapes", split="test", subset=subset, reader=ImageReader(blank))
    assert [row["answer"] for row in loaded] == [answer for _, _, answer in rows]


def test_a_kind_of_question_that_does_not_exist_is_refused(blank: Path) -> None:
    with pytest.raises(
        DatasetError, match=r"subset is 'count\+size', .* no questions of kind 'size'; expected some of"
    ):
        get_custom_dataset("shapes", subset="count+size", reader=ImageReader(blank))


@pytest.mark.parametrize("form", ["path", "bytes", "base64", "data URL", "PIL", "mapping"])
def test_a_picture_of_any_form_becomes_the_same_row(blank: Path, tmp_path: Path, form: str) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(PNG)
    text = base64.b64encode(PNG).decode()
    forms: dict[str, Any] = {
        "path": str(file),
        "bytes": PNG,
        "base64": text,
        "data URL": f"data:image/png;base64,{text}",
        "PIL": Image.open(file),
        "mapping": {"bytes": PNG, "path": None},
    }
    reader, tokenizer = ImageReader(blank), load_tokenizer(blank)
    row = {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]}
    tokens, (image,) = encode_image_prompt(tokenizer, row | {"images": [forms[form]]}, reader)
    assert image.digest == reader.read(PNG).digest
    assert tokens.count(reader.image_format.token) == 9
    assert Image.open(io.BytesIO(as_png(image, reader))).tobytes() == Image.open(file).tobytes()
    names = save_images(tmp_path / "pictures", reader, [image, image])
    assert len({*names}) == len([*(tmp_path / "pictures").iterdir()]) == 1


def test_named_sets_have_their_pictures_for_a_model_that_sees(blank: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"problem": "<image>how many?", "answer": "3", "images": [{"bytes": PNG, "path": "p.png"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    reader, tokenizer = ImageReader(blank), load_tokenizer(blank)
    (rl,) = get_geometry3k_rl_dataset(tmp_path, "train", tokenizer, processor=reader, instruction=None)
    assert rl["messages"][0]["content"] == [{"type": "image"}, {"type": "text", "text": "how many?"}]
    assert rl["images"][0]["bytes"] == PNG
    (sft,) = get_clevr_count_70k_sft_dataset(tmp_path, "train", tokenizer, processor=reader)
    trained = [token for token, mask in zip(sft["input_ids"], sft["loss_mask"], strict=True) if mask]
    assert tokenizer.decode(trained) == "3<|im_end|>"
    assert sft["input_ids"].count(reader.image_format.token) == 9


def test_a_column_without_a_value_hides_no_picture_of_the_other() -> None:
    assert image_sources({"images": None, "image": "a"}) == image_sources({"images": ["a"], "image": None}) == ["a"]
    assert image_sources({"images": None}) == image_sources({"images": [], "image": "b"}) == []


def test_what_is_wrong_with_the_pictures_of_a_row_is_said_in_one_line(blank: Path, tmp_path: Path) -> None:
    reader, tokenizer = ImageReader(blank), load_tokenizer(blank)
    file = tmp_path / "rows.jsonl"
    for text, images, problem in (
        ("<image><image>?", [base64.b64encode(PNG).decode()], "2 image placeholders"),
        ("<image>?", [base64.b64encode(PNG[:90]).decode()], "truncated|no image"),
        ("<image>?", ["https://example.org/a.png"], "is a URL"),
        ("<|image_pad|><image>?", [base64.b64encode(PNG).decode()], "2 image placeholders"),
    ):
        row = {"prompt": text, "response": "1", "images": images}
        file.write_text(json.dumps(row) + "\n")
        with pytest.raises(DatasetError, match=problem) as raised:
            get_custom_dataset(file, kind="sft", tokenizer=tokenizer, reader=reader)
        assert "\n" not in str(raised.value)
    with pytest.raises(DatasetError, match="expected the checkpoint of a vision-language model"):
        get_custom_dataset("shapes", kind="sft", tokenizer=tokenizer)
    with pytest.raises(ImageError, match="no image reader"):
        encode_image_prompt(tokenizer, {"prompt": "a", "images": [PNG]}, None)
