"""The FLOP table of Qwen3 in both conventions, from the configs alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from archon.models import get_model_spec
from archon.models.flops import Flops, MatmulShape, training_state_bytes
from archon.models.layers.feed_forward import DenseLayer
from archon.models.lora.model import add_lora
from archon.models.lora.targets import active_parameters, resolve_lora_sizes
from archon.schema.config import LoRAConfig
from archon.schema.errors import ConfigError

CONFIGS = Path(__file__).parents[1] / "data" / "hf_configs"
# GFLOP a token at 4,096 tokens: attention counted in full, and causally.
QWEN3 = {
    "Qwen3-0.6B": (6.39, 4.99),
    "Qwen3-1.7B": (13.1, 11.7),
    "Qwen3-4B": (31.4, 27.8),
    "Qwen3-8B": (52.7, 49.0),
    "Qwen3-14B": (94.0, 89.0),
    "Qwen3-32B": (217.7, 204.8),
    "Qwen3-30B-A3B": (27.9, 23.1),
}
_ROWS = (row.split("\t") for row in (CONFIGS / "PARAMETERS.tsv").read_text().splitlines()[1:])
PARAMETERS = {name: int(count) for name, _, count in _ROWS}


def config_of(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / name / "config.json").read_text())


def significant(value: float, like: float) -> float:
    """Rounded to as many decimals as the figure it is compared with."""
    return round(value, len(str(like).split(".")[1]))


@pytest.mark.parametrize("name", QWEN3)
def test_gflop_per_token_is_the_published_table(name: str) -> None:
    flops = MatmulShape.from_hf_config(config_of(name)).per_token(4096)
    full, causal = QWEN3[name]
    assert (significant(flops.full / 1e9, full), significant(flops.causal / 1e9, causal)) == (full, causal)


@pytest.mark.parametrize("name", sorted(n for n in PARAMETERS if n.startswith(("Qwen2.5", "Qwen3")) and "-A" not in n))
def test_the_model_arguments_and_the_config_count_alike(name: str) -> None:
    config = config_of(name)
    args = get_model_spec(config["model_type"]).model_args_class.from_hf_config(config)
    assert MatmulShape.from_args(args) == MatmulShape.from_hf_config(config)


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Qwen3-235B-A22B"])
def test_a_mixture_counts_every_expert_in_total_and_the_chosen_ones_as_active(name: str) -> None:
    config = config_of(name)
    shape = MatmulShape.from_hf_config(config)
    dim, layers = config["hidden_size"], config["num_hidden_layers"]
    norms = layers * (2 * dim + 2 * config["head_dim"]) + dim
    assert shape.total + config["vocab_size"] * dim + norms == PARAMETERS[name]
    idle = config["num_experts"] - config["num_experts_per_tok"]
    assert shape.total - shape.active == layers * idle * 3 * dim * config["moe_intermediate_size"]


def test_dense_layers_of_a_mixture_are_counted_as_dense() -> None:
    config = config_of("Qwen3-30B-A3B")
    dim, expert = config["hidden_size"], 3 * config["hidden_size"] * config["moe_intermediate_size"]
    sparse = dim * 128 + 8 * expert
    dense = 3 * dim * config["intermediate_size"]
    plain = MatmulShape.from_hf_config(config).active
    assert MatmulShape.from_hf_config(config | {"mlp_only_layers": [0, 5]}).active == plain + 2 * (dense - sparse)
    every_other = config | {"decoder_sparse_step": 2}  # layers 1, 3, 5, … are sparse
    assert MatmulShape.from_hf_config(every_other).active == plain + 24 * (dense - sparse)
    assert MatmulShape.from_hf_config(every_other | {"mlp_only_layers": [0]}).active == plain + 24 * (dense - sparse)
    assert MatmulShape.from_hf_config(every_other | {"mlp_only_layers": [1]}).active == plain + 25 * (dense - sparse)


def test_a_network_without_a_gate_has_two_matrices() -> None:
    assert DenseLayer(32, "relu2", is_gated=False).parameters(8) == (2 * 8 * 32, 2 * 8 * 32)
    assert DenseLayer(32, "relu2", bias=True, is_gated=False).parameters(8)[0] == 2 * 8 * 32 + 32 + 8


def test_packed_documents_pay_attention_by_the_square_of_their_length() -> None:
    shape = MatmulShape(active=1000, total=1000, attention=((8, None), (8, None)))
    full, causal = shape.packed([3, 5])
    assert full == 6 * 1000 * 8 + 2 * 12 * 8 * (9 + 25)
    assert causal == 6 * 1000 * 8 + 2 * 12 * 8 * (9 + 25) / 2


def test_frozen_weights_cost_no_gradient_and_their_adapters_all_three_products() -> None:
    shape = MatmulShape(active=1000, total=1000, attention=((8, None),), lora=10)
    assert shape.packed([3, 5]).full == (4 * 1000 + 6 * 10) * 8 + 12 * 8 * (9 + 25)


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3-30B-A3B"])
def test_a_token_uses_the_adapters_of_the_experts_it_chooses(name: str) -> None:
    """Against every adapter's parameters, those of experts divided by how many there are for one that is chosen."""
    config = config_of(name)
    spec = get_model_spec(config["model_type"])
    names = spec.state_dict_adapter_class(config)
    sizes = resolve_lora_sizes(names, LoRAConfig(rank=4))
    with torch.device("meta"):
        model = spec.model_class(names.args)
        add_lora(model, sizes, torch.float32)
    expected = 0
    for parameter, tensor in model.named_parameters():
        if ".lora." in parameter:
            share = config["num_experts_per_tok"] / config["num_experts"] if ".experts." in parameter else 1
            expected += round(tensor.numel() * share)
    assert active_parameters(names, sizes) == expected > 0


def test_a_sliding_window_bounds_attention() -> None:
    windowed = MatmulShape(active=0, total=0, attention=((1, 4),))
    whole = MatmulShape(active=0, total=0, attention=((1, None),))
    assert windowed.packed([4]) == whole.packed([4])
    assert windowed.packed([10]) == Flops(12 * 10 * 4, 12 * (10 * 4 - 8))
    config = config_of("Qwen3-0.6B") | {
        "layer_types": ["sliding_attention", "full_attention"] * 14,
        "sliding_window": 512,
    }
    attention = MatmulShape.from_hf_config(config).attention
    assert tuple(window for _, window in attention) == (512, None) * 14


def test_mfu_is_the_share_of_the_peak() -> None:
    assert Flops(600.0, 400.0).mfu(seconds=2.0, peak=1000.0) == Flops(0.3, 0.2)


def test_training_keeps_masters_gradients_and_two_moments() -> None:
    state = training_state_bytes(10)
    assert (state.parameters, state.gradients, state.optimizer, state.total) == (40, 40, 80, 160)


def test_a_config_it_cannot_count_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"deepseek_v3.*kv_lora_rank, but only attention with uncompressed keys"):
        MatmulShape.from_hf_config(config_of("DeepSeek-V3"))
    with pytest.raises(ConfigError, match="lacks 'vocab_size'"):
        MatmulShape.from_hf_config({"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1})
