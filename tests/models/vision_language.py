"""Small checkpoints of models that see, and batches with pictures for them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from archon.checkpoint.hf_io import save_model
from archon.models import get_model_spec
from archon.models.args.base import ImageFormat
from archon.models.vision.images import ProcessedImage
from archon.models.vision.language_model import VisionLanguageModel
from archon.tools.check.oracle import randomize_vectors

IMAGE, VOCAB = 60, 61
DENSE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 28,
    "vocab_size": VOCAB,
    "rms_norm_eps": 0.1,
    "initializer_range": 0.08,
    "max_position_embeddings": 512,
}
ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 100.0,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
TEXTS: dict[str, dict[str, Any]] = {
    "qwen3_5": DENSE
    | {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_value_head_dim": 8,
        "linear_key_head_dim": 8,
        "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
    },
    "qwen3_vl": DENSE | {"rope_parameters": ROPE | {"mrope_section": [4, 2, 2]}},
}
TEXTS["qwen2_5_vl"] = {name: value for name, value in DENSE.items() if name != "head_dim"} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]}
}
TEXTS["qwen3_vl_moe"] = TEXTS["qwen3_vl"] | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 20,
    "in_channels": 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 9,
    "initializer_range": 0.2,
}
FAMILY_VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"depth": 3, "window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_5": {},
    "qwen3_vl": {"depth": 3, "deepstack_visual_indexes": [0, 1]},
    "qwen3_vl_moe": {"depth": 3, "deepstack_visual_indexes": [0, 1]},
}


def vision_language_config(model_type: str = "qwen3_5", **text: Any) -> dict[str, Any]:
    """A composite `config.json` that transformers writes, with some fields of the decoder changed."""
    vision = {k: v for k, v in VISION.items() if model_type != "qwen2_5_vl" or k != "num_position_embeddings"}
    config = CONFIG_MAPPING[model_type](
        text_config=TEXTS[model_type] | text,
        vision_config=vision | FAMILY_VISION[model_type],
        image_token_id=IMAGE,
    )
    return json.loads(config.to_json_string(use_diff=False))


def write_vision_language(folder: Path, model_type: str = "qwen3_5", seed: int = 0, **text: Any) -> VisionLanguageModel:
    """Write a checkpoint in float32. Returns its model, in float64."""
    folder.mkdir(parents=True, exist_ok=True)
    config = vision_language_config(model_type, **text)
    (folder / "config.json").write_text(json.dumps(config))
    spec = get_model_spec(model_type)
    model = spec.model_class(spec.model_args_class.from_hf_config(config))
    assert isinstance(model, VisionLanguageModel)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.init_weights()
        randomize_vectors(model)
    model.init_buffers("cpu")
    save_model(model, folder / "weights", like=folder, passthrough=False)
    return model.double()


def random_image(rng: random.Random, image: ImageFormat) -> ProcessedImage:
    """A picture of random pixels and size."""
    height, width = (image.merge_size * rng.randint(1, 3) for _ in range(2))
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return ProcessedImage(torch.randn(height * width, image.features, generator=generator), (1, height, width))


def image_rows(counts: Sequence[int], image: ImageFormat, seed: int = 0) -> dict[str, Any]:
    """A padded batch whose rows have these numbers of pictures, next to text of odd lengths."""
    rng = random.Random(seed)
    rows, images = list[list[int]](), list[list[ProcessedImage]]()
    for count in counts:
        tokens, own = [rng.randrange(IMAGE) for _ in range(rng.randint(2, 9))], list[ProcessedImage]()
        for _ in range(count):
            own.append(random_image(rng, image))
            height, width = own[-1].size
            tokens += [1, *[image.token] * (height * width // image.merge_size**2), 2]
            tokens += [rng.randrange(IMAGE) for _ in range(rng.choice([0, 3]))]
        rows.append(tokens + [rng.randrange(IMAGE) for _ in range(4)])
        images.append(own)
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    loss_mask = mask * (ids != image.token)
    return {"input_ids": ids, "attention_mask": mask, "loss_mask": loss_mask, "images": images}
