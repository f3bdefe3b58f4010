"""The text decoder of composite checkpoints: computed, with the other parts carried to the export bitwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from archon.check.oracle import pack, randomize_vectors, relative
from archon.checkpoint.hf_io import load_model, save_model
from archon.models import get_model_spec
from archon.schema.errors import ConfigError
from tests.tolerances import PARITY_FP32

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 24,
    "vocab_size": 61,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_value_head_dim": 8,
    "linear_key_head_dim": 8,
    "rms_norm_eps": 0.1,
    "initializer_range": 0.08,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
LENGTHS = [9, 1, 70, 5]


def composite(folder: Path, **options: Any) -> Qwen3_5ForConditionalGeneration:
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=TEXT, vision_config=VISION, **options)).eval()
    randomize_vectors(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_the_text_of_a_composite_checkpoint_is_computed_and_the_rest_is_carried(tied: bool, tmp_path: Path) -> None:
    theirs = composite(tmp_path / "theirs", tie_word_embeddings=tied)
    ours = load_model(tmp_path / "theirs", dtype=torch.float32)
    assert ours.args.tie_word_embeddings is tied
    tokens, positions, bounds, longest = pack(LENGTHS, TEXT["vocab_size"], 0)
    with torch.no_grad():
        expected = torch.cat(
            [theirs(input_ids=part[None], use_cache=False).logits[0] for part in tokens.split(LENGTHS)]
        )
        assert relative(ours(tokens, positions, bounds, longest), expected) <= PARITY_FP32
    save_model(ours, tmp_path / "ours", like=tmp_path / "theirs")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys() and any("visual" in name for name in before)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"text_config": None}, "text_config"),
        ({"audio_config": {}}, "audio_config"),
        ({"text_config": TEXT | {"model_type": "llama"}}, "text_config.model_type"),
        ({"text_config": TEXT | {"a_field_of_tomorrow": 1}}, "a_field_of_tomorrow"),
    ],
)
def test_a_field_of_a_composite_config_is_read_or_refused(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    composite(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ConfigError, match=named):
        get_model_spec("qwen3_5").model_args_class.from_hf_config(config | change)
