"""Batches with images through the engine: equal to one document at a time."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from archon.engine.engine import ArchonEngine
from archon.engine.loss import CrossEntropyLoss, loss_token_count
from archon.models.vision.images import PackedImages, ProcessedImage, multimodal_positions
from archon.models.vision.language_model import VisionLanguageModel
from archon.schema.config import EngineConfig
from archon.schema.errors import BatchError, ConfigError
from archon.tools.doctor.checks import MAX_DIMS, replica_mismatches
from tests.models.vision_language import TEXTS, image_rows, random_image, write_vision_language
from tests.tolerances import REORDER_FP64

COUNTS = [0, 2, 1, 0, 1]


@pytest.fixture(scope="module", params=TEXTS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, VisionLanguageModel]:
    folder = tmp_path_factory.mktemp("seeing")
    return folder / "weights", write_vision_language(folder, request.param)


def engine_of(path: Path, **options: Any) -> ArchonEngine:
    options = {"dtype": "float64", "device": "cpu", "max_tokens_per_mb": 48, "compile": False} | options
    engine = ArchonEngine(EngineConfig(path=str(path), **options))
    engine.initialize(10)
    return engine


def rows_one_at_a_time(model: VisionLanguageModel, batch: dict[str, Any]) -> list[Tensor]:
    """The log-probabilities of each row's tokens after the first."""
    image, results = model.args.image_format, []
    for ids, mask, row_images in zip(batch["input_ids"], batch["attention_mask"], batch["images"], strict=True):
        tokens = ids[mask != 0]
        sizes = [processed.size for processed in row_images]
        positions, _ = multimodal_positions(tokens, sizes, image.token, image.merge_size)
        images = PackedImages.from_images(tokens, row_images, image) if row_images else None
        bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
        logits = model(tokens, positions, bounds, len(tokens), images=images)
        results.append(logits[:-1].log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1))
    return results


def test_logprobs_and_gradients_are_those_of_one_row_at_a_time(checkpoint: tuple[Path, VisionLanguageModel]) -> None:
    path, model = checkpoint
    engine = engine_of(path, vision="trained")
    batch = image_rows(COUNTS, model.args.image_format)
    rows = rows_one_at_a_time(model, batch)
    logprobs = engine.forward_batch(batch)
    for row, expected in zip(logprobs, rows, strict=True):
        assert (row[1 : len(expected) + 1] - expected).abs().max() <= REORDER_FP64 * expected.abs().max()
    masks = [m[1 : len(r) + 1] for m, r in zip(batch["loss_mask"], rows, strict=True)]
    loss = -sum((row * mask).sum() for row, mask in zip(rows, masks, strict=True)) / batch["loss_mask"][:, 1:].sum()
    loss.backward()
    grads, metrics = engine.gradients(batch, CrossEntropyLoss(), loss_token_count)
    assert metrics["micro_batches"] > 1
    expected_grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    assert grads.keys() == expected_grads.keys() and sum(name.startswith("visual.") for name in grads) > 20
    for name, grad in grads.items():
        expected = expected_grads[name]
        assert (grad - expected).abs().max() <= 1e-10 * expected.abs().max(), name


def test_documents_that_begin_alike_may_end_with_a_picture(checkpoint: tuple[Path, VisionLanguageModel]) -> None:
    """The last tokens of a prompt may be rows of an image."""
    path, model = checkpoint
    image = model.args.image_format
    processed = random_image(random.Random(4), image)
    placeholders = [image.token] * (processed.size[0] * processed.size[1] // image.merge_size**2)
    ids = torch.tensor([[3, 5, 4, 6, 1, *placeholders]] * 3)
    mask = torch.ones_like(ids)
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "loss_mask": mask * (ids != image.token)}
    batch["images"] = [[processed]] * 3
    shared, whole = (engine_of(path, share_prefixes=share).forward_batch(batch) for share in (True, False))
    assert (shared - whole).abs().max() <= REORDER_FP64 * whole.abs().max()


def test_a_tower_is_frozen_unless_it_is_to_be_trained(checkpoint: tuple[Path, VisionLanguageModel]) -> None:
    path, model = checkpoint
    batch = image_rows(COUNTS, model.args.image_format)
    engine = engine_of(path)
    before = {name: parameter.clone() for name, parameter in engine.model.named_parameters()}
    engine.train_batch(batch, CrossEntropyLoss(), loss_token_count)
    moved = {name for name, p in engine.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved and not any(name.startswith("visual.") for name in moved)
    engine.save(path.parent / "trained")
    frozen = engine_of(path.parent / "trained").model.visual.state_dict()
    assert all(torch.equal(frozen[name.removeprefix("visual.")], before[name]) for name in before if "visual." in name)


def test_doctor_compares_every_parameter_of_a_tower(checkpoint: tuple[Path, VisionLanguageModel]) -> None:
    engine = engine_of(checkpoint[0])
    assert max(parameter.dim() for parameter in engine.model.parameters()) == MAX_DIMS
    assert replica_mismatches(engine) == []


def test_recomputed_gradients_are_the_same(checkpoint: tuple[Path, VisionLanguageModel]) -> None:
    path, model = checkpoint
    batch = image_rows([1, 0, 2], model.args.image_format)
    results = []
    for mode in ("none", "full"):
        engine = engine_of(path, vision="trained", activation_checkpoint={"mode": mode})
        results.append(engine.gradients(batch, CrossEntropyLoss(), loss_token_count)[0])
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(grad, results[1][name]) for name, grad in results[0].items())


def test_text_only_carries_the_tower_bit_for_bit(checkpoint: tuple[Path, VisionLanguageModel]) -> None:
    path, model = checkpoint
    engine = engine_of(path, vision="off", dtype="float32")
    text = {k: v for k, v in image_rows([0, 0], model.args.image_format).items() if k != "images"}
    engine.train_batch(text, CrossEntropyLoss(), loss_token_count)
    engine.save(path.parent / "text")
    before, after = (engine_of(folder, dtype="float32").model for folder in (path, path.parent / "text"))
    towers = [dict(m.visual.named_parameters()) for m in (before, after)]
    assert all(torch.equal(towers[0][name], towers[1][name]) for name in towers[0])
    decoders = [dict(m.layers.named_parameters()) for m in (before, after)]
    assert not any(torch.equal(decoders[0][name], decoders[1][name]) for name in decoders[0])
    with pytest.raises(BatchError, match="the batch has images, and this is a text model"):
        engine.forward_batch(image_rows([1], model.args.image_format))


def test_batches_whose_pictures_do_not_fit_are_refused(checkpoint: tuple[Path, VisionLanguageModel]) -> None:
    path, model = checkpoint
    engine, image = engine_of(path), model.args.image_format
    batch = image_rows([1, 2], image)
    small = ProcessedImage(torch.zeros(4, 5), (1, 2, 2))
    for images, message in [
        ([batch["images"][0], []], "document 1 of the batch: .* placeholder tokens .* for 0 images"),
        ([batch["images"][0]], "images has 1 lists of images; expected one for each of 2 rows"),
        ([[7], []], "images of row 0 has a int; expected images"),
        (torch.zeros(2), "images is a Tensor; expected a list of images for each of 2 rows"),
        ([[small], []], "patches of an image have 5 values, this model's have 96"),
    ]:
        with pytest.raises(BatchError, match=message):
            engine.forward_batch(batch | {"images": images})


def test_a_tower_that_does_not_exist_is_not_trained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TEXTS["qwen3_5"] | {"model_type": "qwen3_5_text"}))
    with pytest.raises(ConfigError, match=r"vision = 'trained' .* family qwen3_5_text has none"):
        engine_of(tmp_path, vision="trained", init_from_scratch=True)
    with pytest.raises(ConfigError, match="lora freezes all weights"):
        EngineConfig(path=str(tmp_path), vision="trained", lora={"rank": 2})


def test_an_adapter_of_the_tower_comes_back_from_pefts_format(checkpoint: tuple[Path, VisionLanguageModel]) -> None:
    path, model = checkpoint
    batch = image_rows([1, 2], model.args.image_format)
    targets = ["q_proj", "visual.blocks.0.attn.qkv"]
    if model.visual.spec.deepstack:
        targets.append("visual.deepstack_merger_list.1.linear_fc2")
    engine = engine_of(path, lora={"rank": 2, "targets": targets, "init": "random"})
    assert {name.partition(".")[0] for name in engine.lora} == {"layers", "visual"}
    engine.save(path.parent / "adapter", format="peft")
    again = engine_of(path, lora={"path": str(path.parent / "adapter")})
    assert torch.equal(again.forward_batch(batch), engine.forward_batch(batch))
    assert not any(name.startswith("visual.") for name in engine_of(path, lora={"rank": 2}).lora)
    with pytest.raises(ConfigError, match="multi-LoRA does not support them"):
        engine_of(path, lora={"loras": {"x": {"targets": targets}}})
