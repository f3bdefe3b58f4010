"""The text decoder of composite checkpoints: computed, with the other parts carried to the export bitwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForConditionalGeneration

from archon.checkpoint.convert import convert
from archon.checkpoint.hf_io import load_model, save_model
from archon.models import get_model_spec
from archon.schema.errors import ConfigError
from archon.tools.check.oracle import pack, randomize_vectors, relative_error
from archon.tools.check.parity import parity
from archon.tools.check.round_trip import round_trip
from archon.tools.check.silent_defaults import field_outcomes
from tests.tolerances import PARITY_FP32

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
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
TEXTS = {
    "qwen3_5": TEXT | {"intermediate_size": 24},
    "qwen3_5_moe": TEXT
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20},
}
MODELS: dict[str, type[PreTrainedModel]] = {
    "qwen3_5": Qwen3_5ForConditionalGeneration,
    "qwen3_5_moe": Qwen3_5MoeForConditionalGeneration,
}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
# What published configs hold besides the fields of transformers' classes.
PUBLISHED = {
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}
LENGTHS = [9, 1, 70, 5]
WEIGHTS = "model.safetensors"


def composite(folder: Path, model_type: str, **options: Any) -> PreTrainedModel:
    """A checkpoint of transformers to which a layer that predicts further tokens and a published config's fields are
    added."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, text_config=TEXTS[model_type], vision_config=VISION, **options)
    model = MODELS[model_type](config).eval()
    randomize_vectors(model)
    model.save_pretrained(folder)
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {"mtp.layers.0.mlp.experts.gate_up_proj": torch.randn(4, 24, 32)}, folder / WEIGHTS)
    published = json.loads((folder / "config.json").read_text())
    published["text_config"] |= PUBLISHED
    (folder / "config.json").write_text(json.dumps(published))
    return model


def expected_logits(theirs: PreTrainedModel, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([theirs(input_ids=part[None], use_cache=False).logits[0] for part in tokens.split(LENGTHS)])


def assert_same_tensors(found: Path, wanted: Path) -> None:
    before, after = load_file(wanted / WEIGHTS), load_file(found / WEIGHTS)
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", TEXTS)
def test_the_text_of_a_composite_checkpoint_is_computed_and_the_rest_is_carried(
    model_type: str, tied: bool, tmp_path: Path
) -> None:
    theirs = composite(tmp_path / "theirs", model_type, tie_word_embeddings=tied)
    ours = load_model(tmp_path / "theirs", dtype=torch.float32)
    assert ours.args.tie_word_embeddings is tied
    tokens, positions, bounds, longest = pack(LENGTHS, TEXT["vocab_size"], 0)
    with torch.no_grad():
        assert relative_error(ours(tokens, positions, bounds, longest), expected_logits(theirs, tokens)) <= PARITY_FP32
    save_model(ours, tmp_path / "ours", like=tmp_path / "theirs")
    assert_same_tensors(tmp_path / "ours", tmp_path / "theirs")
    names = load_file(tmp_path / "ours" / WEIGHTS).keys()
    assert {name.split(".")[0] for name in names} >= {"model", "mtp"} and any("visual" in name for name in names)


def test_stacked_experts_are_read_and_written_as_transformers_does(tmp_path: Path) -> None:
    """Published checkpoints hold a layer's experts as two stacks; transformers reads them and writes single ones."""
    theirs = composite(tmp_path / "single", "qwen3_5_moe")
    tensors = load_file(tmp_path / "single" / WEIGHTS)
    single = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." in name and "mtp" not in name}
    stacks = {name: tensor for name, tensor in theirs.state_dict().items() if ".mlp.experts." in name}
    assert sum(map(torch.Tensor.numel, single.values())) == sum(map(torch.Tensor.numel, stacks.values()))
    (tmp_path / "stacked").mkdir()
    (tmp_path / "stacked" / "config.json").write_bytes((tmp_path / "single" / "config.json").read_bytes())
    kept = {name: tensor for name, tensor in tensors.items() if name not in single}
    save_file(kept | {name: stack.contiguous() for name, stack in stacks.items()}, tmp_path / "stacked" / WEIGHTS)

    one, other = (dict(load_model(tmp_path / name).named_parameters()) for name in ("single", "stacked"))
    assert one.keys() == other.keys() and all(torch.equal(weight, other[name]) for name, weight in one.items())
    save_model(load_model(tmp_path / "stacked"), tmp_path / "exported", like=tmp_path / "stacked")
    assert_same_tensors(tmp_path / "exported", tmp_path / "single")
    for to in ("hf", "native"):
        convert(tmp_path / "stacked", tmp_path / to, to=to)
    assert_same_tensors(tmp_path / "hf", tmp_path / "single")
    convert(tmp_path / "native", tmp_path / "back", to="hf", like=tmp_path / "single")
    assert_same_tensors(tmp_path / "back", tmp_path / "single")


@pytest.mark.parametrize("model_type", TEXTS)
def test_the_contracts_hold_for_composite_models(model_type: str, tmp_path: Path) -> None:
    assert max(parity(2, model_type).values()) <= PARITY_FP32
    round_trip(1, model_type, tmp_path)
    written = load_file(tmp_path / "copy" / WEIGHTS)
    assert sum("visual" in name for name in written) > 10


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"text_config": None}, "text_config"),
        ({"audio_config": {}}, "audio_config"),
        ({"text_config": {"model_type": "llama"}}, "text_config.model_type"),
        ({"text_config": {"a_field_of_tomorrow": 1}}, "a_field_of_tomorrow"),
        ({"text_config": {"output_gate_type": "sigmoid"}}, "output_gate_type"),
    ],
)
@pytest.mark.parametrize("model_type", TEXTS)
def test_a_field_of_a_composite_config_is_read_or_refused(model_type: str, change: dict[str, Any], named: str) -> None:
    config = {"model_type": model_type, "text_config": TEXTS[model_type] | PUBLISHED, "vision_config": VISION}
    args_class = get_model_spec(model_type).model_args_class
    assert args_class.from_hf_config(config).n_layers == 4
    if change.get("text_config"):
        change = {"text_config": config["text_config"] | change["text_config"]}
    with pytest.raises(ConfigError, match=named):
        args_class.from_hf_config(config | change)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TEXTS)
def test_every_field_of_a_text_config_counts_as_in_transformers_or_is_refused(model_type: str) -> None:
    outcomes, wrong = field_outcomes(model_type, "transformers 5")
    assert wrong == []
    assert outcomes["equal"] >= 20 and outcomes["rejected"] >= 10
