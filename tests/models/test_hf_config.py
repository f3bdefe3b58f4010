"""Configs are read strictly: every field is mapped, known to be without effect, or refused by name and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Qwen2Config, Qwen3Config

from archon.models import RopeConfig, get_model_spec
from archon.models.hf.config import NO_EFFECT
from archon.models.qwen2 import Qwen2ModelArgs
from archon.models.qwen3 import Qwen3ModelArgs
from archon.models.qwen3_moe import Qwen3MoEModelArgs
from archon.models.spec import FAMILIES
from archon.schema.errors import ConfigError, UserError
from archon.tools.check.family import REFERENCES
from archon.tools.check.oracle import checkpoint_tensors, family_config, hf_classes
from archon.tools.check.round_trip import EXPORTED_AS_RELEASED

CONFIGS = Path(__file__).parents[1] / "data" / "hf_configs"
PARAMETERS = {
    row[0]: row[1:] for row in (line.split("\t") for line in (CONFIGS / "PARAMETERS.tsv").read_text().splitlines())
}
DENSE = [name for name, (model_type, _) in PARAMETERS.items() if model_type in ("qwen2", "qwen3", "llama", "mistral")]
MIXED = [name for name, (model_type, _) in PARAMETERS.items() if model_type == "qwen3_moe"]
LATENT = [name for name, (model_type, _) in PARAMETERS.items() if model_type == "deepseek_v3"]
PUBLISHED = DENSE + MIXED + LATENT

SMALL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "vocab_size": 99,
    "max_position_embeddings": 640,
}


def read(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / name / "config.json").read_text())


def small(**changes: Any) -> dict[str, Any]:
    return SMALL | changes


def test_all_configs_of_supported_families_are_there() -> None:
    assert len(DENSE) == 15
    assert MIXED == ["Qwen3-30B-A3B", "Qwen3-235B-A22B"]
    assert LATENT == ["DeepSeek-V3"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_give_published_parameter_counts(name: str) -> None:
    config, (model_type, count) = read(name), PARAMETERS[name]
    adapter = get_model_spec(model_type).state_dict_adapter_class(config)
    total = 0
    for shape in adapter.native_shapes.values():
        size = 1
        for extent in shape:
            size *= extent
        total += size
    assert total == int(count)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_object_and_its_dictionary_read_alike(name: str) -> None:
    args_class = get_model_spec(PARAMETERS[name][0]).model_args_class
    from_file = args_class.from_hf_config(read(name))
    from_object = args_class.from_hf_config(AutoConfig.from_pretrained(CONFIGS / name))
    assert from_file == from_object


@pytest.mark.parametrize("name", MIXED)
def test_another_familys_config_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="'model_type' is 'qwen3_moe'; expected qwen3 in this family"):
        Qwen3ModelArgs.from_hf_config(read(name))


# The defaults of GLM-4.5 give 42 features to a head, of which half is odd; those of Qwen3-VL's tower another width;
# DeepSeek-V2 has no default of chosen experts.
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "qwen2_5_vl": {"vision_config": {"out_hidden_size": 8192}},
    "qwen3_vl": {"vision_config": {"out_hidden_size": 4096}},
    "qwen3_vl_moe": {"vision_config": {"out_hidden_size": 2048}},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family: str) -> None:
    needed = NEEDED.get(family, {})
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    config = family_config(hf_classes(REFERENCES.get(family, family))[0](**needed), family)
    args_class = get_model_spec(family).model_args_class
    text = config.get("text_config", config)
    bare: dict[str, Any] = {name: text[name] for name in sizes if name in text}
    bare = {"model_type": family} | (bare if text is config else {"text_config": bare}) | needed
    assert args_class.from_hf_config(bare) == args_class.from_hf_config(config)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in {t for t, _ in PARAMETERS.values()}])
def test_a_config_of_defaults_has_as_many_parameters_as_in_transformers(family: str) -> None:
    config_class, model_class = hf_classes(REFERENCES.get(family, family))
    config = config_class(**NEEDED.get(family, {}))
    with torch.device("meta"):
        reference = model_class(config)
    adapter, tensors = (
        get_model_spec(family).state_dict_adapter_class(family_config(config, family)),
        checkpoint_tensors(reference),
    )
    adapter = adapter.for_keys(tensors) if family in EXPORTED_AS_RELEASED else adapter
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == adapter.hf_shapes()


def test_every_other_layer_of_qwen2_moe_slides_without_layer_types() -> None:
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    config = small(**EXPERTS | window | {"model_type": "qwen2_moe"})
    args_class = get_model_spec("qwen2_moe").model_args_class
    assert args_class.from_hf_config(config).layer_windows == (8, None, 8, None)
    off = config | {"use_sliding_window": False, "sliding_window": 0}
    assert args_class.from_hf_config(off).layer_windows == (None,) * 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attn_type_list": [1, 1, 0, 1]}, r"'attn_type_list' is \[1, 1, 0, 1\]; expected 1 for every layer"),
        ({"scoring_func": "softmax"}, "'scoring_func' is 'softmax'; archon supports only 'sigmoid'"),
        ({"num_experts": 7}, "'num_experts' is 7; it contradicts num_local_experts 6; keep one"),
        ({"rotary_dim": 5}, "'partial_rotary_factor' is 0.3125; expected a fraction that rotates an even number"),
    ],
)
def test_fields_of_the_published_minimax_m2_config(changes: dict[str, Any], said: str) -> None:
    published = {
        "attn_type_list": [1] * 4, "scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer",
        "use_routing_bias": True, "shared_intermediate_size": 0, "layernorm_mlp_beta": 1.0, "rotary_dim": 8,
        "mlp_intermediate_size": 80, "shared_moe_mode": "sigmoid", "use_mtp": True, "num_mtp_modules": 3,
        "mtp_transformer_layers": 1, "sliding_window": None, "auto_map": {"AutoConfig": "c.C"}, "head_dim": 16,
    }  # fmt: skip
    config = small(model_type="minimax_m2", num_local_experts=6, num_experts_per_tok=2, **published)
    args_class = get_model_spec("minimax_m2").model_args_class
    args = args_class.from_hf_config(config)
    assert (args.rotary_dim, args.rope_theta, args.n_experts, args.moe_hidden_dim) == (8, 5e6, 6, args.hidden_dim)
    with pytest.raises(ConfigError, match=said):
        args_class.from_hf_config(config | changes)


def test_fields_are_mapped() -> None:
    args = Qwen3ModelArgs.from_hf_config(
        small(rms_norm_eps=1e-5, hidden_act="gelu", attention_bias=True, tie_word_embeddings=True, rope_theta=5e5)
        | {"initializer_range": 0.03, "pad_token_id": 7}
    )
    assert (args.dim, args.n_layers, args.n_heads, args.n_kv_heads, args.head_dim) == (48, 4, 6, 2, 16)
    assert (args.hidden_dim, args.vocab_size, args.max_seq_len, args.norm_eps) == (80, 99, 640, 1e-5)
    assert (args.hidden_act, args.attention_bias, args.attention_out_bias, args.qk_norm) == ("gelu", True, True, True)
    assert (args.tie_word_embeddings, args.rope_theta, args.initializer_range) == (True, 5e5, 0.03)
    assert (args.pad_token_id, args.is_critic, args.attn_type) == (7, False, "auto")


def test_qwen2_has_biases_on_queries_keys_and_values_only() -> None:
    args = Qwen2ModelArgs.from_hf_config(small(model_type="qwen2", head_dim=None, num_key_value_heads=None))
    assert (args.attention_bias, args.attention_out_bias, args.qk_norm) == (True, False, False)
    assert (args.head_dim, args.n_kv_heads) == (8, 6)


def test_keyword_arguments_override_the_config() -> None:
    args = Qwen3ModelArgs.from_hf_config(small(), is_critic=True, attn_type="sdpa", n_layers=4, norm_eps=0.1)
    assert (args.is_critic, args.attn_type, args.norm_eps) == (True, "sdpa", 0.1)
    with pytest.raises(ConfigError, match="has no field 'norm_epsilon'; did you mean 'norm_eps'"):
        Qwen3ModelArgs.from_hf_config(small(), norm_epsilon=0.1)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, (5, 5, 5, 5)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (None, None, None, 5)),
    ],
)
def test_an_overriding_window_reaches_the_layers(config: dict[str, Any], layers: tuple[int | None, ...]) -> None:
    args = Qwen3ModelArgs.from_hf_config(small(**config), sliding_window=5)
    assert (args.sliding_window, args.layer_windows) == (5, layers)
    assert set(Qwen3ModelArgs.from_hf_config(small(**config), sliding_window=None).layer_windows) == {None}


YARN = {"factor": 4.0, "original_max_position_embeddings": 160}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **YARN}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 160},
    ],
)
def test_old_and_new_rope_styles_read_alike(changes: dict[str, Any]) -> None:
    args = Qwen3ModelArgs.from_hf_config(small(**changes))
    assert args.rope_theta == 5e5
    assert args.rope_scaling == RopeConfig("yarn", factor=4.0, original_max_seq_len=160)


def test_the_original_context_defaults_to_the_context() -> None:
    args = Qwen3ModelArgs.from_hf_config(small(rope_scaling={"type": "yarn", "factor": 2.0}))
    assert args.rope_scaling.original_max_seq_len == 640


@pytest.mark.parametrize(
    ("changes", "window", "layers"),
    [
        ({}, None, (None,) * 4),
        ({"sliding_window": 8, "max_window_layers": 1}, None, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, 8, (None, None, None, 8)),
        ({"use_sliding_window": True, "sliding_window": 8}, 8, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, None, (None,) * 4),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            8,
            (8, None, 8, None),
        ),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_sliding_windows_read_as_in_transformers(
    changes: dict[str, Any], window: int | None, layers: tuple[int | None, ...], family: str
) -> None:
    config = small(model_type=family, **changes)
    args = get_model_spec(family).model_args_class.from_hf_config(config)
    assert (args.sliding_window, args.layer_windows) == (window, layers)
    reference = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}[family](**config)
    expected = [reference.sliding_window if kind == "sliding_attention" else None for kind in reference.layer_types]
    assert list(layers) == expected


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma3_text", {}),
        ("gemma3_text", {"sliding_window_pattern": 3}),
        ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"] * 4}),
        ("olmo3", {}),
        ("gpt_oss", {}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 8}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 8, "no_rope_layer_interval": 3}),
        ("smollm3", {"no_rope_layers": [1, 0, 0, 1, 1, 1, 0, 1, 1]}),
    ],
)
def test_layers_have_the_windows_and_rotations_that_transformers_gives_them(
    family: str, changes: dict[str, Any]
) -> None:
    reference = hf_classes(family)[0](**small(model_type=family, num_hidden_layers=8, pad_token_id=None, **changes))
    fields = {name: reference.to_dict()[name] for name in SMALL} | {"pad_token_id": None}
    args = get_model_spec(family).model_args_class.from_hf_config(fields | changes)
    kinds = [reference.sliding_window if kind == "sliding_attention" else None for kind in reference.layer_types]
    assert list(args.layer_windows) == kinds
    for layer, window in enumerate(args.layer_windows):
        rope = args.rope(layer)
        rotates = getattr(reference, "no_rope_layers", [1] * 8)[layer]
        assert (rope is not None) == bool(rotates)
        if rope is not None and family in ("gemma3_text", "olmo3"):
            kind = "full_attention" if window is None else "sliding_attention"
            assert rope.theta == reference.rope_parameters[kind]["rope_theta"]


def test_an_unknown_field_is_refused_with_its_value() -> None:
    with pytest.raises(ConfigError, match=r"'softcap' is 30.0; archon does not know this field"):
        Qwen3ModelArgs.from_hf_config(small(softcap=30.0))
    with pytest.raises(ConfigError, match=r"'hiden_act' is 'silu'.* did you mean 'hidden_act'"):
        Qwen3ModelArgs.from_hf_config(small(hiden_act="silu"))


@pytest.mark.parametrize(
    "notes",
    [
        {"unsloth_fixed": True, "unsloth_version": "2025.3.19", "_attn_implementation_autoset": True},
        {"model_max_length": 4096, "max_sequence_length": 2048, "torchscript": False, "gradient_checkpointing": False},
        {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": "{{ messages }}"},
        {"_flash_attn_2_enabled": True, "use_flash_attn": True, "transformers.js_config": {"dtype": "q4"}},
        {"embd_pdrop": 0.0, "hidden_dropout": 0, "pretraining_tp": 1, "mlp_bias": False, "rope_interleaved": False},
        {"some_field_of_a_tool": None, "_rope_scaling_validation": None, "auto_map": None},
    ],
)
def test_notes_of_tools_and_values_without_effect_change_nothing(notes: dict[str, Any]) -> None:
    assert Qwen3ModelArgs.from_hf_config(small(**notes)) == Qwen3ModelArgs.from_hf_config(SMALL)


def test_dropout_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    args = Qwen3ModelArgs.from_hf_config(small(attention_dropout=0.1625))
    assert args == Qwen3ModelArgs.from_hf_config(SMALL)
    assert "'attention_dropout' is 0.1625; archon trains without dropout" in caplog.text


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"pretraining_tp": 2}, "'pretraining_tp' is 2"),
    ({"mlp_bias": True}, "'mlp_bias' is True"),
    ({"rope_interleaved": True}, "'rope_interleaved' is True"),
    ({"quantization": {"bits": 4, "group_size": 64}}, "'quantization' is"),
    ({"hidden_act": "xielu"}, "hidden_act is 'xielu'"),
    ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is 0.5"),
    ({"use_mrope": True}, "'use_mrope' is True"),
    ({"is_encoder_decoder": True}, "'is_encoder_decoder' is True"),
    ({"add_cross_attention": True}, "'add_cross_attention' is True"),
    ({"quantization_config": {"bits": 4}}, "'quantization_config.quant_method' is None"),
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "'quantization_config.quant_method' is 'awq'"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "weight_block_size' is"),
    ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "e4m3"}}, "activation_scheme' is 'e4m3'"),
    ({"quantization_config": {"quant_method": "fp8", "expert_dtype": "fp4"}}, "expert_dtype' is 'fp4'"),
    ({"quantization_config": {"quant_method": "mxfp4", "weight_block_size": [1, 32]}}, "does not know this option"),
    ({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": "lm_head"}}, "a list of module names"),
    ({"quantization_config": "fp8"}, "'quantization_config' is 'fp8'"),
    ({"auto_map": {"AutoModel": "x.Y"}}, "'auto_map' is"),
    ({"pruned_heads": {"0": [1]}}, "'pruned_heads' is"),
    ({"per_layer_config": {"0": {}}}, "'per_layer_config' is"),
    ({"hidden_size": "48"}, "'hidden_size' is '48'; expected type int"),
    ({"hidden_size": 48.0}, "'hidden_size' is 48.0; expected type int"),
    ({"hidden_size": True}, "'hidden_size' is True; expected type int"),
    ({"hidden_size": None}, "'hidden_size' is None"),
    ({"hidden_size": 0}, "'hidden_size' is 0; expected at least 1"),
    ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan"),
    ({"tie_word_embeddings": 1}, "'tie_word_embeddings' is 1"),
    ({"num_key_value_heads": 4}, "n_kv_heads is 4; expected a divisor of n_heads 6"),
    ({"head_dim": 7}, "head_dim is 7; expected an even number"),
    ({"pad_token_id": 99}, "pad_token_id is 99"),
    ({"pad_token_id": -1}, "'pad_token_id' is -1"),
    ({"rope_theta": 0.5}, "'rope_theta' is 0.5"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "rope_type' is 'mrope'"),
    ({"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}}, "rope_type'"),
    ({"rope_scaling": {"type": "linear"}}, "'rope_scaling' lacks 'factor'"),
    ({"rope_scaling": {"type": "linear", "factor": None}}, "'rope_scaling' lacks 'factor'"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "'rope_scaling.factor' is '2'"),
    ({"rope_scaling": {"type": "linear", "factor": -2}}, "'rope_scaling.factor' is -2; expected only numbers above 0"),
    (
        {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
        "'rope_scaling.high_freq_factor' is 1.0; expected more than low_freq_factor, 4.0",
    ),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [0.0]}}, r"long_factor' is \[0.0\]"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}}, "'rope_scaling.beta_fast' is 32"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 3.0}}, "'rope_scaling.alpha' is 3.0"),
    ({"rope_scaling": {"type": "default", "factor": 2.0}}, "'rope_scaling.factor' is 2.0"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": None}}, "'rope_scaling.truncate' is None"),
    ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "'rope_scaling' lacks 'low_freq_factor'"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "short_factor has 1 entries"),
    ({"rope_scaling": {"type": "longrope", "short_factor": 1.0, "long_factor": [1.0]}}, "short_factor' is 1.0"),
    ({"rope_scaling": ["yarn"]}, r"'rope_scaling' is \['yarn'\]"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "'rope_parameters.partial_rotary_factor' is 0.5"),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "linear", "factor": 3.0}},
        "'rope_scaling' is .* contradicts rope_parameters",
    ),
    ({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "'rope_theta' is 10000.0"),
    ({"use_sliding_window": True, "sliding_window": 0}, "'sliding_window' is 0"),
    ({"use_sliding_window": 1}, "'use_sliding_window' is 1"),
    ({"layer_types": ["full_attention"]}, "'layer_types' is"),
    ({"layer_types": "full"}, "'layer_types' is 'full'"),
    ({"layer_types": 3}, "'layer_types' is 3"),
    ({"layer_types": [["full_attention"], {}]}, "'layer_types' is"),
    ({"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000; expected at most 1000"),
    ({"rms_norm_eps": -1e-6}, "'rms_norm_eps' is -1e-06; expected a number of at least 0"),
    ({"rope_parameters": {"rope_type": ["yarn"]}}, r"'rope_parameters.rope_type' is \['yarn'\]"),
    ({"rope_scaling": {"rope_type": "default", "type": "yarn"}}, "'rope_scaling.rope_type' is 'default'"),
    ({"model_type": ["qwen3"]}, r"'model_type' is \['qwen3'\]"),
    ({"layer_types": ["chunked_attention"] * 4}, "'layer_types' is"),
    ({"layer_types": ["sliding_attention"] * 4}, "'layer_types' is .* use_sliding_window or sliding_window is off"),
]


KINDS = {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": None}
REFUSED_ROPES: list[tuple[str, dict[str, Any], str]] = [
    (
        "gemma3_text",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "'rope_parameters.rope_type' is 'linear'",
    ),
    (
        "gemma3_text",
        {"rope_parameters": {"local": {}}},
        r"'rope_parameters.local' is \{\}; expected full_attention and",
    ),
    ("gemma3_text", {"rope_parameters": KINDS, "rope_scaling": {"rope_type": "default"}}, "it contradicts rope_param"),
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'rope_scaling' is .* with a rope_type"),
    (
        "gemma3_text",
        {"rope_parameters": KINDS, "original_max_position_embeddings": 9},
        "archon does not know this field",
    ),
    ("gemma3_text", {"sliding_window": None}, "'sliding_window' is None"),
    ("exaone4", {"sliding_window_pattern": "LLLG"}, "'sliding_window_pattern' is 'LLLG'"),
    ("exaone4", {"sliding_window_pattern": 0}, "'sliding_window_pattern' is 0; expected at least 1, or layer_types"),
    ("exaone4", {"sliding_window": None}, "'sliding_window' is None"),
    ("granite_swa", {"layer_rope_theta": [1e4, 0]}, "'layer_rope_theta' is .* for each of 4 layers"),
    ("granite_swa", {"layer_rope_theta": [1e4, 0, 0.5, 1e4]}, "'layer_rope_theta' is .*expected 0 or a number above 1"),
    ("olmoe", {"head_dim": None, "clip_qkv": 8.0}, "'clip_qkv' is 8.0"),
    ("gemma2", {"hidden_act": "gelu"}, "'hidden_act' is 'gelu'; archon supports only 'gelu_pytorch_tanh'"),
    ("ernie4_5", {"use_bias": True}, "'use_bias' is True; archon supports only False"),
    ("seed_oss", {"mlp_bias": True}, "'mlp_bias' is True; archon supports only False"),
    ("gemma3_text", {"sliding_window_pattern": 0}, "'sliding_window_pattern' is 0"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "'attn_logit_softcapping' is 50.0"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "'use_bidirectional_attention' is True"),
    ("gemma3_text", {"final_logit_softcapping": 0.0}, "logits_soft_cap is 0.0; expected 1e-30 to 1e.30"),
    ("gemma3_text", {"rope_local_base_freq": 1.0}, "'rope_local_base_freq' is 1.0"),
    ("olmo3", {"rope_theta": 1e6}, "'rope_theta' is 1000000.0; set rope_theta per kind"),
    ("granite", {"logits_scaling": 0.0}, "logits_divisor is 0.0; expected 1e-30 to 1e.30"),
    ("smollm3", {"no_rope_layers": [1, 0]}, r"'no_rope_layers' is \[1, 0\]; expected 1 or 0"),
    ("smollm3", {"no_rope_layer_interval": 0}, "'no_rope_layer_interval' is 0"),
    ("smollm3", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window or sliding_window is off"),
    ("ministral3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "llama_4_scaling_beta' is None"),
    ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "rope_type' is 'default'; expected a type with"),
    ("phi3", {"partial_rotary_factor": 0.0}, "partial_rotary_factor' is 0.0"),
    ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor' is 1.5"),
    (
        "phi3",
        {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
        "it contradicts the 0.25",
    ),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED_ROPES, ids=[m for _, _, m in REFUSED_ROPES])
def test_what_a_family_cannot_honor_is_refused_by_field_and_value(
    family: str, changes: dict[str, Any], message: str
) -> None:
    config = small(model_type=family, pad_token_id=None) | changes
    with pytest.raises(ConfigError, match=message):
        get_model_spec(family).model_args_class.from_hf_config(config)


@pytest.mark.parametrize(
    ("changes", "rotary_dim"),
    [
        ({}, 16),
        ({"partial_rotary_factor": 0.5}, 8),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, 8),
        ({"partial_rotary_factor": None}, 16),
    ],
)
def test_a_share_of_each_head_is_rotated(changes: dict[str, Any], rotary_dim: int) -> None:
    config = small(model_type="phi3", pad_token_id=None) | changes
    assert get_model_spec("phi3").model_args_class.from_hf_config(config).rotary_dim == rotary_dim


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_honoured_is_refused_by_field_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        Qwen3ModelArgs.from_hf_config(small(**changes))
    assert "\n" not in str(refusal.value)


def test_a_missing_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="'intermediate_size' is missing"):
        Qwen3ModelArgs.from_hf_config({k: v for k, v in SMALL.items() if k != "intermediate_size"})


def test_what_is_no_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a transformers config or a dictionary, got str"):
        Qwen3ModelArgs.from_hf_config("Qwen/Qwen3-4B")


def test_fields_without_effect_change_nothing() -> None:
    assert Qwen3ModelArgs.from_hf_config(
        small(**dict.fromkeys(NO_EFFECT - {"model_type"}, "anything"))
    ) == Qwen3ModelArgs.from_hf_config(SMALL)


# Mixtures of experts

EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


def test_fields_of_a_mixture_of_experts_are_mapped() -> None:
    args = Qwen3MoEModelArgs.from_hf_config(small(**EXPERTS, mlp_only_layers=[3], decoder_sparse_step=2))
    assert (args.n_experts, args.n_experts_per_token, args.moe_hidden_dim, args.norm_topk_prob) == (6, 2, 32, True)
    assert [args.is_sparse(layer) for layer in range(4)] == [False, True, False, False]
    assert (args.hidden_dim, args.balance_by_bias, args.qk_norm) == (80, False, True)


def test_a_sliding_window_slides_in_every_layer() -> None:
    args = Qwen3MoEModelArgs.from_hf_config(small(**EXPERTS, use_sliding_window=True, sliding_window=8))
    assert args.layer_windows == (8,) * 4
    assert Qwen3MoEModelArgs.from_hf_config(small(**EXPERTS, sliding_window=8)).layer_windows == (None,) * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 7}, "n_experts_per_token is 7; expected 1 to n_experts 6"),
        ({"num_experts_per_tok": 0}, "'num_experts_per_tok' is 0; expected at least 1"),
        ({"moe_intermediate_size": 0}, "'moe_intermediate_size' is 0; expected at least 1"),
        ({"decoder_sparse_step": 0}, "'decoder_sparse_step' is 0; expected at least 1"),
        ({"mlp_only_layers": [-1]}, r"'mlp_only_layers' is \[-1\]"),
        ({"mlp_only_layers": 1}, "'mlp_only_layers' is 1; expected type list"),
        ({"norm_topk_prob": 1}, "'norm_topk_prob' is 1; expected type bool"),
        ({"num_local_experts": 8}, "'num_local_experts' is 8; it contradicts num_experts 6"),
        ({"shared_expert_intermediate_size": 64}, "'shared_expert_intermediate_size' is 64; archon does not know"),
    ],
)
def test_a_mixture_of_experts_that_cannot_be_honoured_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Qwen3MoEModelArgs.from_hf_config(small(**EXPERTS | changes))
