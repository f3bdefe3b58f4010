"""Nemotron-H: layers of one part, configs in all published forms, names of files, and what is refused."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import pytest
import torch

from archon.models import get_model_spec
from archon.models.layers.attention import AttentionLayer
from archon.models.layers.feed_forward import DenseLayer
from archon.models.layers.mamba import MambaLayer
from archon.models.layers.moe import ExpertsLayer
from archon.models.layers.norm import NormSpec
from archon.models.layers.spec import LayerSpec, NoFeedForward, NoMixer
from archon.models.lora.targets import lora_matrices
from archon.schema.errors import CheckpointError, ConfigError, FamilyError
from archon.tools.describe_blocks import describe_blocks

SPEC = get_model_spec("nemotron_h")
# The fields of Nemotron 3 Nano's config.json that have a size.
NANO: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_hidden_layers": 52,
    "hidden_size": 2688,
    "vocab_size": 131072,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 1856,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000,
    "sliding_window": None,
    "time_step_limit": [0.0, float("inf")],
    "time_step_min": 0.001,
}
NANO_9B_V2 = NANO | {
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "num_hidden_layers": 56,
    "hidden_size": 4480,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 15680,
    "mamba_num_heads": 128,
    "mamba_head_dim": 80,
}
TINY: dict[str, Any] = {
    "model_type": "nemotron_h",
    "layers_block_type": ["mamba", "moe", "attention", "mlp"],
    "hidden_size": 16,
    "vocab_size": 11,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 8,
    "n_routed_experts": 4,
    "moe_intermediate_size": 6,
    "moe_shared_expert_intermediate_size": 10,
    "mamba_num_heads": 2,
    "mamba_head_dim": 4,
    "n_groups": 1,
    "ssm_state_size": 4,
}


@pytest.mark.parametrize(
    # NVIDIA's cards give 31.6 and 8.9 billion parameters.
    ("config", "parameters"),
    [(NANO, 31_577_937_344), (NANO_9B_V2, 8_888_227_328)],
    ids=["Nemotron 3 Nano", "Nemotron Nano 9B v2"],
)
def test_published_sizes_give_published_parameter_counts(config: dict[str, Any], parameters: int) -> None:
    assert sum(map(prod, SPEC.state_dict_adapter_class(config).native_shapes.values())) == parameters


def test_a_layer_is_a_mixer_or_a_network() -> None:
    specs = SPEC.model_args_class.from_hf_config(TINY).layer_specs
    assert [(type(spec.mixer), type(spec.feed_forward)) for spec in specs] == [
        (MambaLayer, NoFeedForward),
        (NoMixer, ExpertsLayer),
        (AttentionLayer, NoFeedForward),
        (NoMixer, DenseLayer),
    ]
    names = {name.partition(".")[2] for name in SPEC.state_dict_adapter_class(TINY).native_shapes if "layers.1" in name}
    assert {name for name in names if "norm" in name} == {"1.attention_norm.weight"}
    assert not {name for name in names if "w1" in name}, "experts without a gate"


def test_the_convolution_has_an_activation_of_its_own() -> None:
    args = SPEC.model_args_class.from_hf_config(TINY | {"mamba_hidden_act": "gelu", "mlp_hidden_act": "relu2"})
    mixers = [spec.mixer for spec in args.layer_specs if isinstance(spec.mixer, MambaLayer)]
    networks = [spec.feed_forward for spec in args.layer_specs if isinstance(spec.feed_forward, DenseLayer)]
    assert {mixer.hidden_act for mixer in mixers} == {"gelu"}
    assert {network.hidden_act for network in networks} == {"relu2"}


def test_a_norm_of_both_parts_is_needed_by_a_layer_of_one() -> None:
    with pytest.raises(FamilyError, match="norm_placement is 'before' in a layer of a mixer or a network alone"):
        LayerSpec(NoMixer(), DenseLayer(8), NormSpec(1e-6))
    with pytest.raises(FamilyError, match="a layer without a mixer has no module for it"):
        NoMixer().build(0, 16)
    with pytest.raises(FamilyError, match="a layer without a network has no module for it"):
        NoFeedForward().build(16)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers_block_type": None, "hybrid_override_pattern": "ME*-"},
        {"hybrid_override_pattern": "ME*-"},
        {"layers_block_type": None, "layer_types": ["linear_attention", "moe", "full_attention", "mlp"]},
        {"n_groups": None, "mamba_n_groups": 1, "num_hidden_layers": 4},
        {"rms_norm_eps": 1e-5, "mtp_hybrid_override_pattern": "*E", "num_nextn_predict_layers": 1},
    ],
)
def test_all_forms_of_a_config_read_alike(changes: dict[str, Any]) -> None:
    config = {name: value for name, value in (TINY | changes).items() if value is not None}
    read = SPEC.model_args_class.from_hf_config
    assert read(config) == read(TINY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 5}, "'num_hidden_layers' is 5; expected 4, the number of kinds of layers"),
        ({"hybrid_override_pattern": "MX"}, "'hybrid_override_pattern' is 'MX'; expected M (linear_attention) or * "),
        ({"hybrid_override_pattern": "MM*-"}, "'hybrid_override_pattern' is 'MM*-'; it contradicts layers_block_type"),
        ({"layers_block_type": ["mamba", "conv"]}, "'layers_block_type' is ['mamba', 'conv']; expected mamba or "),
        ({"layers_block_type": []}, "'layers_block_type' is []; expected mamba or "),
        ({"norm_eps": 1e-6}, "'norm_eps' is 1e-06; expected layer_norm_epsilon 1e-05, which the model uses"),
        ({"time_step_limit": [0.0, 0.1]}, "'time_step_limit' is [0.0, 0.1]; expected no limits"),
        ({"time_step_min": -1.0}, "mamba_dt_limits are -1.0 and inf; expected 0 <= smallest < largest"),
        ({"tie_word_embeddings": True}, "'tie_word_embeddings' is True; archon supports only False"),
        ({"attention_bias": True}, "'attention_bias' is True; archon supports only False"),
        ({"residual_in_fp32": True}, "'residual_in_fp32' is True; archon supports only False"),
        ({"n_shared_experts": 2}, "'n_shared_experts' is 2; archon supports only 1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"sliding_window": 8}, "'sliding_window' is 8; archon does not know this field"),
        ({"mamba_hidden_act": "swoosh"}, "mamba_hidden_act is 'swoosh'; expected one of silu"),
    ],
)
def test_configs_that_archon_does_not_compute_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        SPEC.model_args_class.from_hf_config(TINY | changes)


@pytest.mark.parametrize("prefix", ["backbone.", "model.", ""])
def test_files_of_all_namings_are_read_and_export_as_released(prefix: str) -> None:
    adapter = SPEC.state_dict_adapter_class(TINY)
    released = {name: torch.randn(shape) for name, shape in adapter.hf_shapes().items()}
    assert "backbone.layers.1.mixer.experts.3.up_proj.weight" in released
    named = {name.replace("backbone.", prefix, 1): tensor for name, tensor in released.items()}
    reader = adapter.for_keys(named)
    native = reader.from_hf(named)
    exported = adapter.to_hf(native)
    assert exported.keys() == released.keys()
    assert all(torch.equal(exported[name], released[name]) for name in released)
    stacked = {name for name in adapter.in_memory.hf_shapes() if ".1.mixer.experts" in name}
    assert stacked == {f"model.layers.1.mixer.experts.{name}_proj" for name in ("up", "down")}


def test_layers_for_multi_token_prediction_pass_through() -> None:
    adapter = SPEC.state_dict_adapter_class(TINY | {"num_nextn_predict_layers": 1})
    assert adapter.hf_to_native("mtp.layers.0.mixer.q_proj.weight") == ()
    assert adapter.is_passthrough("mtp.layers.0.mixer.q_proj.weight")
    with pytest.raises(CheckpointError, match=r"unknown key 'backbone\.layers\.4\.norm\.weight'"):
        adapter.hf_to_native("backbone.layers.4.norm.weight")


def test_lora_targets_are_all_linear_layers_and_experts() -> None:
    adapter = SPEC.state_dict_adapter_class(TINY | {"moe_latent_size": 8})
    names = {name.partition(".")[2].partition(".")[2] for name in lora_matrices(adapter)}
    assert {name for name in names if name.startswith("moe")} == {
        "moe.latent_in.weight",
        "moe.latent_out.weight",
        "moe.experts.w2",
        "moe.experts.w3",
        "moe.shared_experts.w2.weight",
        "moe.shared_experts.w3.weight",
    }
    assert {"mamba.wx.weight", "mamba.wo.weight", "attention.wq.weight", "feed_forward.w3.weight"} <= names


def test_blocks_of_one_part_are_described() -> None:
    lines = describe_blocks(SPEC.model_args_class.from_hf_config(TINY | {"moe_latent_size": 8}))
    titles = [line for line in lines if line.startswith("layer")]
    assert titles == [
        "layer 0: Mamba-2 (2 heads)",
        "layer 1: mixture of experts (2 of 4)",
        "layer 2: full attention without positions",
        "layer 3: dense feed-forward",
    ]
    text = "\n".join(line.partition("#")[0].rstrip() for line in lines)
    assert "up = w3[e](c)\n    y = latent_out(sum(w * w2[e](relu2(up))))\n    shared = w2(relu2(w3(n)))" in text
    assert text.count("n = attention_norm(x)") == 4 and "..." not in text
